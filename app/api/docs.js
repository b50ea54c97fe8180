"use strict";
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // Swagger's own service would get the address of ours.
  validatorUrl: null,
});

# docker buildx bake: the images for amd64 and arm64, with a bill of materials of all their packages (Debian's too) and their provenance.
# REGISTRY=registry.example/team/ VERSION=1.0 docker buildx bake --push
variable "REGISTRY" { default = "" }
variable "VERSION" { default = "latest" }

group "default" { targets = ["convgrad"] }

target "convgrad" {
  context   = "."
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}convgrad:${VERSION}"]
  attest    = ["type=sbom", "type=provenance,mode=max"]
}

# A service that uses a Ray cluster, and the nodes of that cluster.
target "convgrad-ray" {
  inherits = ["convgrad"]
  args     = { CONVGRAD_EXTRA = "ray" }
  tags     = ["${REGISTRY}convgrad-ray:${VERSION}"]
}

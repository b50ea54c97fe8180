"""Generate a TypeScript client from `/openapi.json`, call a service with it, check the OpenRPC document by its
meta-schema, and have the conformance scenarios of the Model Context Protocol call `/mcp` (`scripts/test-clients`). The
page's example is run too. Needs node with npm, and the npm registry on the first run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import referencing

from tests.live import running_service

_HERE = Path(__file__).parent
_FOLDER = _HERE.parents[1] / ".cache" / "clients"
_PAGE = _HERE.parents[1] / "docs" / "generated-clients.md"
_REVISIONS = ("2025-11-25", "2026-07-28")
_FILES = ("package.json", "call.ts", *(f"conformance-{revision}.yaml" for revision in _REVISIONS))
_TSC = ("--strict", "--target", "es2022", "--module", "nodenext", "--moduleResolution", "nodenext", "--skipLibCheck")


def main() -> int:
    """Run all steps; the first that fails ends the program with its output."""
    if shutil.which("npm") is None:
        sys.stderr.write("scripts/test-clients needs node and npm\n")
        return 1
    _FOLDER.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copy(_HERE / name, _FOLDER / name)
    _run("npm", "install", "--no-audit", "--no-fund", "--no-package-lock")
    with (
        tempfile.TemporaryDirectory() as spool,
        running_service("--workers", "1", "--spool", spool) as service,
    ):
        openapi, openrpc = (httpx.get(f"{service.url}/{name}.json", timeout=60) for name in ("openapi", "openrpc"))
        (_FOLDER / "openapi.json").write_bytes(openapi.content)
        _run("npx", "openapi-typescript", "openapi.json", "--output", "schema.d.ts")
        (example,) = re.findall(r"^```ts\n(.*?)^```$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        (_FOLDER / "example.ts").write_text(example.replace("http://127.0.0.1:8000", service.url), encoding="utf-8")
        _run("npx", "tsc", *_TSC, "call.ts", "example.ts")
        _run("node", "call.js", service.url)
        _run("node", "example.js")
        check_openrpc(openrpc.json())
        for revision in _REVISIONS:
            check_mcp(f"{service.url}/mcp", revision)
    return 0


def check_mcp(url: str, revision: str) -> None:
    """Run the scenarios that a revision requires; files have those that need what our server does not offer."""
    program = "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    chosen = ("--requirements", revision, "--expected-failures", f"conformance-{revision}.yaml")
    _run("node_modules/node/bin/node", program, "server", "--url", url, *chosen, "--output-dir", "conformance")


def check_openrpc(document: dict[str, Any]) -> None:
    """Validate the document by OpenRPC's meta-schema, and its schemas by the one that this names."""
    schema, schemas = (_package(name) for name in ("@open-rpc/meta-schema", "@json-schema-tools/meta-schema"))
    specification = referencing.jsonschema.DRAFT7
    known = referencing.Registry[Any]().with_resources(
        (address, specification.create_resource(schemas))
        for address in ("https://meta.json-schema.tools", "https://meta.json-schema.tools/")
    )
    validator = jsonschema.Draft7Validator(schema, registry=known)
    if errors := sorted(validator.iter_errors(document), key=lambda error: error.path):
        raise AssertionError("\n".join(f"{error.json_path}: {error.message[:200]}" for error in errors[:10]))
    print(f"OpenRPC {document['openrpc']}: {len(document['methods'])} methods pass the meta-schema")


def _package(name: str) -> Any:
    program = f"const found = require('{name}'); console.log(JSON.stringify(found.default ?? found))"
    done = subprocess.run(["node", "-e", program], cwd=_FOLDER, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def _run(*command: str) -> None:
    subprocess.run(command, cwd=_FOLDER, check=True)


if __name__ == "__main__":
    sys.exit(main())

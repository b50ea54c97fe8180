# docker buildx bake --push: both images for amd64 and arm64, with a bill of materials of all their packages (Debian's too) and their
# provenance. docs/running.md has the commands.
variable "REGISTRY" { default = "" }
variable "VERSION" { default = "latest" }
# Where the sources are, for the label org.opencontainers.image.source.
variable "SOURCE" { default = "" }

group "default" { targets = ["convgrad", "convgrad-ray"] }

target "convgrad" {
  context   = "."
  platforms = ["linux/amd64", "linux/arm64"]
  args      = { CONVGRAD_SOURCE = SOURCE }
  tags      = ["${REGISTRY}convgrad:${VERSION}"]
  attest    = ["type=sbom", "type=provenance,mode=max"]
}

# A service that uses a Ray cluster, and the nodes of that cluster.
target "convgrad-ray" {
  inherits = ["convgrad"]
  args     = { CONVGRAD_EXTRA = "ray", CONVGRAD_SOURCE = SOURCE }
  tags     = ["${REGISTRY}convgrad-ray:${VERSION}"]
}

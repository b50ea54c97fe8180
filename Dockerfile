# The first stages install and compile, the last one only runs the service.
# Name a digest to build from exactly one image: --build-arg PYTHON_IMAGE=python:3.12-slim@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim
FROM ${PYTHON_IMAGE} AS server
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY requirements/build.txt requirements/server.txt requirements/
# Dependencies first, so that a source change does not reinstall them.
RUN python -m venv --without-pip /opt/convgrad && pip install --quiet --require-hashes -r requirements/build.txt \
 && pip --python /opt/convgrad/bin/python install --quiet --require-hashes -r requirements/server.txt

# Code for every known processor of this architecture, an archive for each: a container uses the one for its processor
# and checks it. Numba finds it by the path of the source, so the path must be the same as below.
FROM server AS code
ARG CONVGRAD_TARGETS=all
WORKDIR /srv/convgrad
COPY kernels kernels
RUN NUMBA_CACHE_DIR=/var/cache/convgrad /opt/convgrad/bin/python -m kernels.prepare --for "$CONVGRAD_TARGETS"
COPY schemas schemas
COPY verify verify
COPY engine engine
COPY app app
RUN /opt/convgrad/bin/python -m compileall -q .

FROM server AS packages
# server, or ray for a service or a node of a Ray cluster: both images share the stage above, which takes longest.
ARG CONVGRAD_EXTRA=server
COPY requirements requirements
RUN pip --python /opt/convgrad/bin/python install --quiet --require-hashes -r "requirements/$CONVGRAD_EXTRA.txt"
COPY pyproject.toml README.md LICENSE ./
COPY convgrad convgrad
# Only the client: the service itself is in /srv/convgrad.
RUN HATCH_BUILD_NO_HOOKS=true pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
 && pip --python /opt/convgrad/bin/python install --quiet --no-deps dist/*.whl \
 && find /opt/convgrad/lib -type d -name tests -prune -exec rm -r {} +  # those of NumPy and Numba: 20 MB

FROM ${PYTHON_IMAGE}
# Nothing installs packages in a running container.
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin convgrad \
 && PYTHONDONTWRITEBYTECODE=1 pip uninstall --quiet --yes --root-user-action=ignore pip && rm -r /usr/local/lib/python3.*/ensurepip \
 # A new volume gets the owner of the folder that it is mounted on: compose keeps the token of a Ray cluster there, and jobs.
 && install -d -o convgrad -m 700 /run/ray /var/lib/convgrad
COPY --from=packages /opt/convgrad /opt/convgrad
# Owned by root, whom every user trusts: a container that runs as any user takes the code from here.
COPY --from=code /var/cache/convgrad /var/cache/convgrad
COPY --from=code /srv/convgrad /srv/convgrad
# Public within the container: publishing the port decides who can reach it.
ENV PATH=/opt/convgrad/bin:$PATH \
    PYTHONPATH=/srv/convgrad \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/convgrad \
    CONVGRAD_HOST=0.0.0.0 \
    CONVGRAD_PUBLIC=true
WORKDIR /srv/convgrad
# A number, because Kubernetes can't tell from a name that the user is not root.
USER 10001
EXPOSE 8000
ARG CONVGRAD_SOURCE=""
LABEL org.opencontainers.image.title="convgrad" \
      org.opencontainers.image.description="Exact, fast, reproducible convolution gradients" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="$CONVGRAD_SOURCE"
# Checks readiness, not only liveness. Plain Python, because it runs every few seconds: 0.06 s of processor time, not 0.40 s.
HEALTHCHECK --interval=5s --timeout=4s --start-period=90s --retries=3 CMD python -I -S -c "import http.client; \
    probe = http.client.HTTPConnection('127.0.0.1', ${CONVGRAD_OPS_PORT:-${CONVGRAD_PORT:-8000}}, timeout=3); \
    probe.request('GET', '/readyz'); answer = probe.getresponse(); print(answer.read().decode()); raise SystemExit(answer.status != 200)"
ENTRYPOINT ["convgrad"]
CMD ["serve"]

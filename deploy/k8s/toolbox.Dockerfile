# The init that every sandbox pod gets, on a small image with sh, cp and mkdir:
#   docker build -f deploy/k8s/toolbox.Dockerfile -t openforge-toolbox:0.1.0 .
ARG MANAGER_IMAGE=openforge-sandbox-manager:0.1.0
ARG BASE_IMAGE=busybox:1.37.0

FROM ${MANAGER_IMAGE} AS made
RUN python -m openforge.sandbox.kubernetes.toolbox /tmp/runtime

FROM ${BASE_IMAGE}
COPY --from=made /tmp/runtime /openforge/runtime
USER 1000:1000

{{/*
The pod of an engine, or of the first host of one: (root, pool, values). `values` are the pool's with
their defaults.
*/}}
{{- define "headrace.enginePod" -}}
{{- $root := .root }}
{{- $engines := $root.Values.engines }}
{{- $values := .values }}
{{- $image := ternary "backend-gpu" "backend" (gt (int $values.gpus) 0) }}
metadata:
  # No version among them: an upgrade of the chart alone starts no pod anew.
  labels: {{- include "headrace.selector" (dict "root" $root "component" "engine" "pool" .pool) | nindent 4 }}
  {{- with $values.pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "headrace.podSettings" (dict "root" $root "pod" $values.pod) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $engines.drainGraceS 15 }}
  initContainers:
    {{- include "headrace.telemetry" (dict "root" $root "pricePerHour" $values.pricePerHour) | nindent 4 }}
    {{- include "headrace.pull" (dict "root" $root "image" $image) | nindent 4 }}
  containers:
    - name: engine
      image: {{ include "headrace.image" (dict "root" $root "name" $image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - backend
        - --model={{ include "headrace.model" $root }}
        {{- with $root.Values.model.name }}
        - --model-name={{ . }}
        {{- end }}
        - --listen=0.0.0.0:{{ $engines.port }}
        {{- if $engines.tls.secret }}
        - --tls-cert=/run/headrace/credentials/engine/server.pem
        - --tls-key=/run/headrace/credentials/engine/server.key
        - --tls-client-ca=/run/headrace/credentials/engine/ca.pem
        {{- end }}
        {{- if $engines.token.secret }}
        - --token-file=/run/headrace/credentials/token/token
        {{- end }}
        {{- if gt (int $values.gpus) 0 }}
        - --device=cuda
        - --tp={{ $values.gpus }}
        - --kernel-cache=/var/cache/headrace/kernels
        {{- else }}
        - --device=cpu
        {{- end }}
        {{- if gt (int $values.hosts) 1 }}
        # A stage on each host: little crosses the network between them.
        - --hosts={{ $values.hosts }}
        - --pp={{ $values.hosts }}
        {{- end }}
        - --probe=0.0.0.0:50062
        - --drain-grace-s={{ $engines.drainGraceS }}
        {{- if $root.Values.telemetry.enabled }}
        - --telemetry-socket=/run/headrace/telemetry/telemetry.sock
        {{- end }}
        - --log-format=json
        {{- include "headrace.options" $values.options | nindent 8 }}
      env:
        {{- include "headrace.engineVariables" . | nindent 8 }}
      ports:
        - {name: engine, containerPort: {{ $engines.port }}}
        - {name: probe, containerPort: 50062}
      {{- include "headrace.probes" 50062 | nindent 6 }}
      resources: {{- include "headrace.engineResources" . | nindent 8 }}
      {{- include "headrace.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        {{- if $root.Values.telemetry.enabled }}
        - {name: telemetry-socket, mountPath: /run/headrace/telemetry}
        {{- end }}
        {{- include "headrace.engineMounts" . | nindent 8 }}
  volumes:
    {{- include "headrace.volumes" $root | nindent 4 }}
    {{- include "headrace.engineVolumes" (dict "values" $values "tlsSecret" $engines.tls.secret "identity" "server") | nindent 4 }}
{{- end }}

{{/* What containers with ranks of an engine have in common: (root, values). */}}
{{- define "headrace.engineVariables" -}}
{{- if gt (int .values.gpus) 0 }}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: "compute,utility"}
{{- end }}
{{- include "headrace.modelVariables" .root }}
{{- end }}

{{- define "headrace.engineResources" -}}
{{- $resources := deepCopy .values.resources }}
{{- if gt (int .values.gpus) 0 }}
{{- $_ := set $resources "limits" (merge (dict .values.gpuResource .values.gpus) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "headrace.engineMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.engines.tls.secret }}
- {name: engine-tls, mountPath: /run/headrace/credentials/engine, readOnly: true}
{{- end }}
{{- if .root.Values.engines.token.secret }}
- {name: engine-token, mountPath: /run/headrace/credentials/token, readOnly: true}
{{- end }}
{{- if gt (int .values.gpus) 0 }}
- {name: kernel-cache, mountPath: /var/cache/headrace}
{{- end }}
{{- if gt (int .values.gpus) 1 }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- include "headrace.modelMount" .root }}
{{- end }}

{{/* Their volumes: (values, tlsSecret, identity), the last being the name of certificate and key. */}}
{{- define "headrace.engineVolumes" -}}
{{- if .tlsSecret }}
# Readable by the pod's group and not by others, as private keys have to be.
- name: engine-tls
  secret:
    secretName: {{ .tlsSecret }}
    defaultMode: 0440
    items:
      - {key: ca.pem, path: ca.pem}
      - {key: {{ .identity }}.pem, path: {{ .identity }}.pem}
      - {key: {{ .identity }}.key, path: {{ .identity }}.key}
{{- end }}
{{- if gt (int .values.gpus) 0 }}
- name: kernel-cache
  {{- if .values.kernelCacheClaim }}
  persistentVolumeClaim: {claimName: {{ .values.kernelCacheClaim }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- if gt (int .values.gpus) 1 }}
# NCCL's; a container's own is 64 MiB.
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: 2Gi}
{{- end }}
{{- end }}

{{/*
The pod of a further host of an engine: (root, pool, values). LeaderWorkerSet tells it where the first
one is. It has no telemetry, because it reports to the first one alone.
*/}}
{{- define "headrace.ranksPod" -}}
{{- $root := .root }}
{{- $engines := $root.Values.engines }}
{{- $values := .values }}
{{- $image := ternary "backend-gpu" "backend" (gt (int $values.gpus) 0) }}
metadata:
  labels: {{- include "headrace.selector" (dict "root" $root "component" "ranks" "pool" .pool) | nindent 4 }}
  {{- with $values.pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "headrace.podSettings" (dict "root" $root "pod" $values.pod) | nindent 2 }}
  # Nothing of its own to finish: the engine drains.
  terminationGracePeriodSeconds: {{ add $engines.drainGraceS 15 }}
  {{- with include "headrace.pull" (dict "root" $root "image" $image) | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: ranks
      image: {{ include "headrace.image" (dict "root" $root "name" $image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - ranks
        - --model={{ include "headrace.model" $root }}
        - --join=$(LWS_LEADER_ADDRESS):{{ $engines.port }}
        {{- if $engines.tls.secret }}
        - --engine-tls-ca=/run/headrace/credentials/engine/ca.pem
        - --engine-tls-cert=/run/headrace/credentials/engine/service.pem
        - --engine-tls-key=/run/headrace/credentials/engine/service.key
        # The certificate is for the name by which services find engines.
        - --engine-tls-name={{ include "headrace.enginesHost" $root }}
        {{- end }}
        {{- if $engines.token.secret }}
        - --engine-token-file=/run/headrace/credentials/token/token
        {{- end }}
        {{- if gt (int $values.gpus) 0 }}
        - --device=cuda
        - --kernel-cache=/var/cache/headrace/kernels
        {{- else }}
        - --device=cpu
        {{- end }}
        - --probe=0.0.0.0:50062
        - --log-format=json
        {{- include "headrace.options" $values.rankOptions | nindent 8 }}
      env:
        {{- include "headrace.engineVariables" . | nindent 8 }}
      ports:
        - {name: probe, containerPort: 50062}
      {{- include "headrace.probes" 50062 | nindent 6 }}
      resources: {{- include "headrace.engineResources" . | nindent 8 }}
      {{- include "headrace.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        {{- include "headrace.engineMounts" . | nindent 8 }}
  volumes:
    {{- include "headrace.volumes" $root | nindent 4 }}
    {{- include "headrace.engineVolumes" (dict "values" $values "tlsSecret" $engines.tls.serviceSecret "identity" "service") | nindent 4 }}
{{- end }}

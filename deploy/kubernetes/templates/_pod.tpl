{{/* Parts that pods of services and engines have in common. */}}

{{/* The pod's own settings: (root, pod), pod being what values say of placement and annotations. */}}
{{- define "headrace.podSettings" -}}
# No variables of other Services: HEADRACE_PORT and the like would be unknown settings.
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "headrace.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/*
Probes of a process at its port for them: SERVING decides who gets work, "alive" who is started
anew. A minute without an answer is a hang; loading a model answers.
*/}}
{{- define "headrace.probes" -}}
startupProbe:
  grpc: {port: {{ . }}, service: alive}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 90
livenessProbe:
  grpc: {port: {{ . }}, service: alive}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ . }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{/* The telemetry sidecar: (root, pricePerHour). It begins before the others and ends after them. */}}
{{- define "headrace.telemetry" -}}
{{- if .root.Values.telemetry.enabled }}
- name: telemetry
  image: {{ include "headrace.image" (dict "root" .root "name" "telemetry") }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  args:
    - telemetry
    - --telemetry-socket=/run/headrace/telemetry/telemetry.sock
    - --metrics-listen=0.0.0.0:{{ .root.Values.telemetry.port }}
    {{- with .root.Values.telemetry.otlpEndpoint }}
    - --otlp-endpoint={{ . }}
    {{- end }}
    {{- with .pricePerHour }}
    - --price-per-hour={{ toJson . }}
    {{- end }}
    - --log-format=json
    {{- include "headrace.options" .root.Values.telemetry.options | nindent 4 }}
  ports:
    - {name: metrics, containerPort: {{ .root.Values.telemetry.port }}}
  startupProbe:
    httpGet: {path: /healthz, port: metrics}
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 90
  livenessProbe:
    httpGet: {path: /healthz, port: metrics}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources: {{- toYaml .root.Values.telemetry.resources | nindent 4 }}
  {{- include "headrace.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: telemetry-socket, mountPath: /run/headrace/telemetry}
{{- end }}
{{- end }}

{{/* The model as the command line names it. */}}
{{- define "headrace.model" -}}
{{- $hub := .Values.model.hub -}}
{{- if $hub.name -}}
{{- $parts := splitList ":" $hub.name -}}
{{ index $parts 0 }}@{{ $hub.commit }}{{ if gt (len $parts) 1 }}:{{ index $parts 1 }}{{ end }}
{{- else -}}
{{ .Values.model.path }}
{{- end -}}
{{- end }}

{{/* The init container that fetches the model: (root, image). */}}
{{- define "headrace.pull" -}}
{{- $model := .root.Values.model }}
{{- if and $model.hub.name (not $model.claim) }}
- name: pull
  image: {{ include "headrace.image" (dict "root" .root "name" .image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [pull, {{ include "headrace.model" .root | quote }}]
  env:
    - {name: HF_HOME, value: /var/cache/huggingface}
    {{- with $model.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $model.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: token}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 512Mi}
    limits: {memory: 1Gi}
  {{- include "headrace.containerSecurity" . | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: model, mountPath: /var/cache/huggingface}
{{- end }}
{{- end }}

{{/* Variables of a container that reads the model. The hub is asked by nobody but the init container. */}}
{{- define "headrace.modelVariables" -}}
{{- if .Values.model.hub.name }}
- {name: HF_HOME, value: /var/cache/huggingface}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}

{{- define "headrace.modelMount" -}}
{{- if .Values.model.hub.name }}
- {name: model, mountPath: /var/cache/huggingface, readOnly: true}
{{- else if .Values.model.claim }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{/* Volumes of every pod. */}}
{{- define "headrace.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .Values.telemetry.enabled }}
- name: telemetry-socket
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- if .Values.model.claim }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}
{{- else if .Values.model.hub.name }}
- name: model
  emptyDir: {sizeLimit: {{ .Values.model.hub.sizeLimit }}}
{{- end }}
{{- with .Values.engines.token.secret }}
- name: engine-token
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: token, path: token}]
{{- end }}
{{- end }}

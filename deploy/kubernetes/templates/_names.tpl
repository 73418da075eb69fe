{{/* What a pool has where values leave it out. */}}
{{- define "headrace.poolDefaults" -}}
hosts: 1
gpus: 0
gpuResource: nvidia.com/gpu
options: {}
rankOptions: {}
resources: {}
kernelCacheClaim: ""
pricePerHour: 0
autoscaling: {}
pod: {}
{{- end }}

{{/* What all objects of a release are called after. Room is left for what follows. */}}
{{- define "headrace.name" -}}
{{- if contains "headrace" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-headrace" (.Release.Name | trunc 31 | trimSuffix "-") -}}
{{- end -}}
{{- end }}

{{/* The host under which services find the engines, and for which the engines' certificate is. */}}
{{- define "headrace.enginesHost" -}}
{{ include "headrace.name" . }}-engines.{{ .Release.Namespace }}.svc
{{- end }}

{{/* What pods are selected by: (root, component). */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .pool }}
headrace/pool: {{ . }}
{{- end }}
{{- end }}

{{/* The labels of an object: (root, component, pool). */}}
{{- define "headrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{ include "headrace.selector" . }}
{{- end }}

{{/* An image: (root, name). */}}
{{- define "headrace.image" -}}
{{ .root.Values.image.prefix }}{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Options as flags: switches, lists and numbers too. toJson keeps 4194304 from becoming 4.194304e+06. */}}
{{- define "headrace.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name . | quote }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $name $value | quote }}
{{- else }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

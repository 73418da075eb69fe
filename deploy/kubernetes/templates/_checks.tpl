{{/*
What values must go together, each with a sentence that says what to change. The forms of single
values are values.schema.json's. Every object that runs something includes this.
*/}}
{{- define "headrace.checks" -}}
{{- $services := .Values.services }}
{{- if and (not $services.insecure) (or (not $services.tls.secret) (not $services.keys.secret)) }}
{{- fail "services.tls.secret and services.keys.secret are needed; services.insecure: true serves without the empty one all the same" }}
{{- end }}
{{- if and $services.tls.clientCa (not $services.tls.secret) }}
{{- fail "services.tls.clientCa needs services.tls.secret: callers show certificates to services that have one" }}
{{- end }}
{{- if not (or $services.grpc.enabled $services.openai.enabled) }}
{{- fail "services.grpc.enabled or services.openai.enabled must be true, or nobody can call" }}
{{- end }}
{{- $tls := .Values.engines.tls }}
{{- if ne (empty $tls.secret) (empty $tls.serviceSecret) }}
{{- fail "engines.tls.secret and engines.tls.serviceSecret: one needs the other" }}
{{- end }}
{{- if not (or $tls.secret .Values.engines.token.secret) }}
{{- fail "engines.tls.secret with engines.tls.serviceSecret, or engines.token.secret, is needed: engines take no services that nothing vouches for" }}
{{- end }}
{{- if not .Values.engines.pools }}
{{- fail "engines.pools is empty: without an engine nothing is computed" }}
{{- end }}
{{- $ports := list .Values.services.grpc.port .Values.services.openai.port .Values.engines.port .Values.telemetry.port }}
{{- range $port := list 50052 50062 }}
{{- range $taken := $ports }}
{{- if eq (int $taken) $port }}
{{- fail (printf "port %d is the one of probes; services, engines and telemetry need others" $port) }}
{{- end }}
{{- end }}
{{- end }}
{{- $hub := .Values.model.hub }}
{{- if ne (empty $hub.name) (empty $hub.commit) }}
{{- fail "model.hub.name and model.hub.commit: one needs the other" }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled (not .Values.telemetry.enabled) }}
{{- fail "serviceMonitor.enabled needs telemetry.enabled: there are no metrics" }}
{{- end }}
{{- $own := list "listen" "openai-listen" "insecure" "tls-cert" "tls-key" "tls-client-ca" "keys-file" "probe" "engine" "engines-dns" "engines-dns-s" "engine-token-file" "engine-tls-ca" "engine-tls-cert" "engine-tls-key" "model-folder" "service-name" "shutdown-grace-s" "telemetry-socket" "reuse-port" "exit-with-parent" "log-format" "config" }}
{{- range $door := list "grpc" "openai" }}
{{- range $name := keys (index $services $door).options }}
{{- if has $name $own }}
{{- fail (printf "services.%s.options: %s is the chart's own" $door $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- $own = list "model" "model-name" "listen" "device" "tp" "hosts" "kernel-cache" "probe" "token-file" "tls-cert" "tls-key" "tls-client-ca" "refusal-file" "telemetry-socket" "drain-grace-s" "log-format" "config" }}
{{- $ranksOwn := list "model" "join" "device" "kernel-cache" "probe" "engine-token-file" "engine-tls-ca" "engine-tls-cert" "engine-tls-key" "engine-tls-name" "log-format" "config" }}
{{- range $pool, $values := .Values.engines.pools }}
{{- $isMany := gt (int $values.hosts) 1 }}
{{- range $name := keys ($values.options | default dict) }}
{{- if or (has $name $own) (and $isMany (eq $name "pp")) }}
{{- fail (printf "engines.pools.%s.options: %s is the chart's own" $pool $name) }}
{{- end }}
{{- end }}
{{- if and $values.rankOptions (not $isMany) }}
{{- fail (printf "engines.pools.%s.rankOptions are for the further hosts of an engine: hosts is 1" $pool) }}
{{- end }}
{{- range $name := keys ($values.rankOptions | default dict) }}
{{- if has $name $ranksOwn }}
{{- fail (printf "engines.pools.%s.rankOptions: %s is the chart's own" $pool $name) }}
{{- end }}
{{- end }}
{{- with $values.autoscaling }}
{{- if hasKey $values "replicas" }}
{{- fail (printf "engines.pools.%s: replicas and autoscaling: one of both decides how many engines there are" $pool) }}
{{- end }}
{{- if not $.Values.telemetry.enabled }}
{{- fail (printf "engines.pools.%s.autoscaling needs telemetry.enabled: waiting tokens are a metric" $pool) }}
{{- end }}
{{- if lt (int .maxReplicas) (int .minReplicas) }}
{{- fail (printf "engines.pools.%s.autoscaling: maxReplicas is less than minReplicas" $pool) }}
{{- end }}
{{- if ne (eq .kind "keda") (not (empty .prometheus)) }}
{{- fail (printf "engines.pools.%s.autoscaling: kind keda needs prometheus, the address that KEDA asks, and kind hpa takes none" $pool) }}
{{- end }}
{{- end }}
{{- end }}
{{- $own = list "telemetry-socket" "metrics-listen" "otlp-endpoint" "price-per-hour" "log-format" "config" }}
{{- range $name := keys .Values.telemetry.options }}
{{- if has $name $own }}
{{- fail (printf "telemetry.options: %s is the chart's own" $name) }}
{{- end }}
{{- end }}
{{- end }}

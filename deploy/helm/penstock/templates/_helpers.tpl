{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Labels that select the pods of one workload: list of the root and the workload's name. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- /* The first map with what the second has in place of it, also where that is empty. JSON. */}}
{{- define "penstock.merged" -}}
{{- $merged := deepCopy (index . 0) }}
{{- range $key, $value := index . 1 }}
{{- if and (kindIs "map" $value) (kindIs "map" (get $merged $key)) }}
{{- $_ := set $merged $key (include "penstock.merged" (list (get $merged $key) $value) | fromJson) }}
{{- else }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- end }}
{{- toJson $merged }}
{{- end }}

{{- /* All deployments by name: their values, and what follows from what they run. `stopSeconds` is the bound of a stop
       after the drain. A gateway that restarts itself is removed after two failed readiness probes, 10 s. JSON. */}}
{{- define "penstock.workloads" -}}
{{- $values := .Values }}
{{- $own := dict "command" "gateway" "tag" $values.image.slim "port" 8000 "stopSeconds" 14 "keys" true "artifacts" true }}
{{- $_ := set $own "settings" (dict
  "GATEWAY__HOST" "0.0.0.0" "GATEWAY__PORT" "8000" "GATEWAY__VIEW_PATH" "/data/gateway/view.sqlite"
  "GATEWAY__VIEW_SNAPSHOT_S" $values.gateway.snapshotSeconds
  "GATEWAY__RESTART_NOTICE_S" (add ($values.gateway.preStopSeconds | default 0) 10)
  "GATEWAY__DRAIN_S" $values.gateway.drainSeconds "GATEWAY__TRUSTED_PROXIES" (toJson $values.gateway.trustedProxies)) }}
{{- $found := dict "gateway" (merge $own $values.gateway) }}
{{- range $name, $port := dict "bridge" 8002 "webhooks" 8003 "summarizer" 8004 }}
{{- $own := dict "command" $name "tag" $values.image.slim "port" $port "stopSeconds" 35 "drainSeconds" 0 }}
{{- $_ := set $own "keys" (eq $name "bridge") }}
{{- $_ := set $own "artifacts" (eq $name "bridge") }}
{{- $section := upper $name }}
{{- $settings := dict (printf "%s__HEALTH_HOST" $section) "0.0.0.0" (printf "%s__HEALTH_PORT" $section) $port }}
{{- if eq $name "summarizer" }}
{{- $_ := set $settings "SUMMARIZER__DATA_DIR" "/data/summarizer" }}
{{- end }}
{{- $_ := set $own "settings" $settings }}
{{- if (get $values $name).enabled }}
{{- $_ := set $found $name (merge $own (get $values $name)) }}
{{- end }}
{{- end }}
{{- range $pool, $given := $values.pools }}
{{- $merged := include "penstock.merged" (list $values.poolDefaults ($given | default dict)) | fromJson }}
{{- $own := dict "command" "worker" "tag" $values.image.worker "port" 8001 "stopSeconds" 35 "artifacts" true "worker" true }}
{{- $_ := set $own "pool" (eq $pool "common" | ternary "" $pool) }}
{{- $settings := dict
  "WORKER__HEALTH_HOST" "0.0.0.0" "WORKER__HEALTH_PORT" "8001" "WORKER__DATA_DIR" "/data/worker"
  "WORKER__DRAIN_S" $merged.drainSeconds }}
{{- if $own.pool }}
{{- $_ := set $settings "WORKER__POOL" $pool }}
{{- end }}
{{- $_ := set $own "settings" $settings }}
{{- $name := printf "worker-%s" $pool | replace "_" "-" | lower }}
{{- if hasKey $found $name }}
{{- fail (printf "pools: two pools have the Deployment %s" $name) }}
{{- end }}
{{- $_ := set $found $name (merge $own $merged) }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- /* Seconds from SIGTERM to SIGKILL: those of the hook, the drain and the stop, and some to log what hung. */}}
{{- define "penstock.grace" -}}
{{- add (.preStopSeconds | default 0) .drainSeconds .stopSeconds 6 }}
{{- end }}

{{- /* A workload's resources, its GPUs among the limits. JSON. */}}
{{- define "penstock.resources" -}}
{{- $limits := dict }}
{{- if .gpus }}
{{- $_ := set $limits .gpuResource (.gpus | toString) }}
{{- end }}
{{- include "penstock.merged" (list .resources (dict "limits" (merge $limits (.resources.limits | default dict)))) }}
{{- end }}

{{- /* What every container of Penstock has: list of the root and the workload. */}}
{{- define "penstock.container" -}}
{{- $root := index . 0 }}
{{- $workload := index . 1 }}
image: {{ $root.Values.image.repository }}:{{ $workload.tag }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: PENSTOCK_CONFIG, value: /etc/penstock/penstock.toml}
  - {name: PENSTOCK_KAFKA__BOOTSTRAP_SERVERS, value: {{ required "kafka.bootstrapServers is required" $root.Values.kafka.bootstrapServers | quote }}}
  - {name: PENSTOCK_TOPICS__POOLS, value: {{ without (keys $root.Values.pools | sortAlpha) "common" | toJson | quote }}}
  {{- with $root.Values.kafka.topicPrefix }}
  - {name: PENSTOCK_KAFKA__TOPIC_PREFIX, value: {{ . | quote }}}
  {{- end }}
  {{- if $workload.artifacts }}
  - {name: PENSTOCK_ARTIFACTS__LOCATION, value: {{ $root.Values.artifacts.location | default "/data/artifacts" | quote }}}
  {{- end }}
  {{- if $workload.keys }}
  - {name: PENSTOCK_AUTH__KEYS_FILE, value: /keys/keys.json}
  {{- end }}
  {{- if $root.Values.secrets.existingSecret }}
  - {name: PENSTOCK_SECRETS, value: /secrets}
  {{- end }}
  {{- if $workload.worker }}
  - {name: PENSTOCK_CACHE, value: /cache}
  - {name: HF_HOME, value: /cache/huggingface}
  {{- end }}
  {{- range $name, $value := $workload.settings }}
  - {name: PENSTOCK_{{ $name }}, value: {{ $value | toString | quote }}}
  {{- end }}
  {{- with $workload.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumeMounts:
  - {name: config, mountPath: /etc/penstock, readOnly: true}
  - {name: data, mountPath: /data}
  - {name: tmp, mountPath: /tmp}
  {{- if and $workload.artifacts (not $root.Values.artifacts.location) }}
  - {name: artifacts, mountPath: /data/artifacts}
  {{- end }}
  {{- if $workload.keys }}
  - {name: keys, mountPath: /keys, readOnly: true}
  {{- end }}
  {{- if $root.Values.secrets.existingSecret }}
  - {name: secrets, mountPath: /secrets, readOnly: true}
  {{- end }}
  {{- if $root.Values.kafkaTls.existingSecret }}
  - {name: kafka-tls, mountPath: /kafka-tls, readOnly: true}
  {{- end }}
  {{- if $workload.worker }}
  - {name: cache, mountPath: /cache}
  {{- end }}
{{- end }}

{{- /* The pod around it: list of the root, the workload, its name and that of the ConfigMap. */}}
{{- define "penstock.pod" -}}
{{- $root := index . 0 }}
{{- $workload := index . 1 }}
{{- $name := index . 2 }}
serviceAccountName: {{ $name }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $workload.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $workload.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: config, configMap: {name: {{ index . 3 }}}}
  - {name: data, emptyDir: {sizeLimit: {{ $workload.dataSize }}}}
  - {name: tmp, emptyDir: {}}
  {{- if and $workload.artifacts (not $root.Values.artifacts.location) }}
  - {name: artifacts, persistentVolumeClaim: {claimName: {{ $root.Values.artifacts.volume.existingClaim | default (printf "%s-artifacts" $root.Release.Name) }}}}
  {{- end }}
  {{- if $workload.keys }}
  - {name: keys, secret: {secretName: {{ required "keys.existingSecret is required: a Secret with keys.json" $root.Values.keys.existingSecret }}}}
  {{- end }}
  {{- with $root.Values.secrets.existingSecret }}
  - {name: secrets, secret: {secretName: {{ . }}}}
  {{- end }}
  {{- with $root.Values.kafkaTls.existingSecret }}
  - {name: kafka-tls, secret: {secretName: {{ . }}}}
  {{- end }}
  {{- if $workload.worker }}
  {{- if or $workload.cache.existingClaim $workload.cache.create }}
  - {name: cache, persistentVolumeClaim: {claimName: {{ $workload.cache.existingClaim | default (printf "%s-cache" $name) }}}}
  {{- else }}
  - {name: cache, emptyDir: {sizeLimit: {{ $workload.cache.size }}}}
  {{- end }}
  {{- end }}
{{- end }}

{{/* pdserve.yaml: what the values decide, over what the user set under `config`. A worker takes the other pool's role only
     where the pods are alike: its KV cache has to fit. */}}
{{- define "pdserve.config" -}}
{{- $model := dict
  "path" .Values.model.path
  "served_name" .Values.model.servedName
  "max_model_len" .Values.model.maxModelLen -}}
{{- $pools := dict
  "prefill" .Values.prefill.replicas
  "decode" .Values.decode.replicas
  "drain_grace_s" (sub .Values.decode.terminationGracePeriodSeconds 15)
  "change_roles" (eq (toJson .Values.prefill.resources) (toJson .Values.decode.resources))
  "start_limit_s" 3600 -}}
{{/* Not by merge, which takes false for nothing. */}}
{{- range $name, $value := .Values.config.pools -}}
{{- $_ := set $pools $name $value -}}
{{- end -}}
{{- $autoscale := dict
  "prefill_min" (max 1 .Values.prefill.minReplicas)
  "prefill_max" .Values.prefill.maxReplicas
  "decode_min" (max 1 .Values.decode.minReplicas)
  "decode_max" .Values.decode.maxReplicas
  "router_url" (printf "http://%s:%v" (include "pdserve.fullname" .) .Values.router.service.httpPort) -}}
{{- $router := dict
  "host" "0.0.0.0"
  "http_port" .Values.router.service.httpPort
  "grpc_port" .Values.router.service.grpcPort
  "metrics_port" .Values.router.metricsPort -}}
{{- if .Values.router.apiKeys.existingSecret -}}
{{/* Pods that end ask for a drain: with API keys that needs the admin key. */}}
{{- $_ := required "router.apiKeys needs router.adminKey.existingSecret: pods drain their workers with it" .Values.router.adminKey.existingSecret -}}
{{- $_ := set $router "api_keys_file" (printf "/etc/pdserve-keys/%s" .Values.router.apiKeys.secretKey) -}}
{{- end -}}
{{- $tls := dict -}}
{{- if .Values.tls.enabled -}}
{{- range $setting, $key := dict "cert_file" "tls.crt" "key_file" "tls.key" "ca_file" "ca.crt" -}}
{{- $_ := set $tls $setting (printf "/etc/pdserve-tls/{role}/%s" $key) -}}
{{- end -}}
{{- end -}}
{{/* Clients and, without tls, workers are answered in the clear inside the cluster: the NetworkPolicies say to whom. */}}
{{- dict
  "namespace" (include "pdserve.fullname" .)
  "insecure" true
  "tls" $tls
  "model" $model
  "pools" $pools
  "autoscale" (merge $autoscale .Values.config.autoscale)
  "router" (merge $router .Values.config.router)
  "prefill_worker" (include "pdserve.workerConfig" (dict "pool" .Values.prefill "config" .Values.config.prefill_worker "root" $) | fromYaml)
  "decode_worker" (include "pdserve.workerConfig" (dict "pool" .Values.decode "config" .Values.config.decode_worker "root" $) | fromYaml)
  | toYaml -}}
{{- end }}

{{/* A worker computes with as many threads as its pod has cores, unless the user says otherwise. */}}
{{- define "pdserve.workerConfig" -}}
{{- $fixed := dict "port" .root.Values.worker.port "metrics_port" .root.Values.worker.metricsPort -}}
{{- $cores := toString .pool.resources.limits.cpu -}}
{{- $derived := dict -}}
{{- if regexMatch "^[1-9][0-9]*$" $cores -}}
{{- $_ := set $derived "num_threads" (int $cores) -}}
{{- end -}}
{{- merge $fixed .config $derived | toYaml -}}
{{- end }}

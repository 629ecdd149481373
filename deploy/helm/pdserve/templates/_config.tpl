{{/* pdserve.yaml: what the values decide, over what the user set under `config`. */}}
{{- define "pdserve.config" -}}
{{- $worker := dict "port" .Values.worker.port "metrics_port" .Values.worker.metricsPort -}}
{{- $router := dict
  "host" "0.0.0.0"
  "http_port" .Values.router.service.httpPort
  "grpc_port" .Values.router.service.grpcPort
  "metrics_port" .Values.router.metricsPort -}}
{{- $model := dict
  "path" .Values.model.path
  "served_name" .Values.model.servedName
  "max_model_len" .Values.model.maxModelLen -}}
{{- $pools := dict
  "prefill" .Values.prefill.replicas
  "decode" .Values.decode.replicas
  "drain_grace_s" (sub .Values.decode.terminationGracePeriodSeconds 15) -}}
{{- dict
  "namespace" (include "pdserve.fullname" .)
  "model" $model
  "pools" $pools
  "router" (merge $router .Values.config.router)
  "prefill_worker" (merge (deepCopy $worker) .Values.config.prefill_worker)
  "decode_worker" (merge (deepCopy $worker) .Values.config.decode_worker)
  | toYaml -}}
{{- end }}

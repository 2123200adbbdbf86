//! Fields of Kubernetes' objects that the mesh reads, as written in a manifest.
//!
//! The module `parse::schema` checks all other fields, which are not kept.

use serde::Deserialize;

use super::Labels;

/// `metadata`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ObjectMeta {
    pub(crate) name: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) labels: Option<Labels>,
    pub(crate) annotations: Option<Labels>,
    pub(crate) creation_timestamp: Option<String>,
    pub(crate) deletion_timestamp: Option<String>,
    pub(crate) uid: Option<String>,
    pub(crate) owner_references: Vec<OwnerReference>,
    // Fields that a cluster sets or that concern it alone.
    #[serde(rename = "generation")]
    _generation: Ignored,
    #[serde(rename = "resourceVersion")]
    _resource_version: Ignored,
    #[serde(rename = "generateName")]
    _generate_name: Ignored,
    #[serde(rename = "finalizers")]
    _finalizers: Ignored,
    #[serde(rename = "managedFields")]
    _managed_fields: Ignored,
    #[serde(rename = "deletionGracePeriodSeconds")]
    _deletion_grace_period: Ignored,
    #[serde(rename = "selfLink")]
    _self_link: Ignored,
}

/// Owner of an object.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct OwnerReference {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) controller: Option<bool>,
}

/// An object of which only the metadata are read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct MetadataOnly {
    pub(crate) metadata: ObjectMeta,
}

/// `v1` Secret. It has no `Debug`, so that no message shows its values.
#[derive(Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct SecretManifest {
    pub(crate) metadata: ObjectMeta,
    #[serde(rename = "type")]
    pub(crate) r#type: String,
    pub(crate) data: Option<Labels>,
    pub(crate) string_data: Option<Labels>,
}

/// `v1` ConfigMap.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ConfigMapManifest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) data: Labels,
}

/// `v1` Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ServiceManifest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: Option<ServiceSpec>,
    pub(crate) status: ServiceStatus,
}

/// `status` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServiceStatus {
    pub(crate) load_balancer: LoadBalancerStatus,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LoadBalancerStatus {
    pub(crate) ingress: Vec<LoadBalancerIngress>,
}

/// Address of a load balancer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct LoadBalancerIngress {
    pub(crate) ip: Option<String>,
    pub(crate) hostname: Option<String>,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServiceSpec {
    #[serde(rename = "clusterIP")]
    pub(crate) cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub(crate) cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    pub(crate) external_ips: Vec<String>,
    pub(crate) external_name: Option<String>,
    pub(crate) ports: Vec<ServicePortManifest>,
    pub(crate) publish_not_ready_addresses: bool,
    pub(crate) selector: Labels,
    pub(crate) traffic_distribution: Option<String>,
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
}

/// A port of a Service.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ServicePortManifest {
    pub(crate) app_protocol: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) port: i32,
    pub(crate) protocol: Option<String>,
    pub(crate) target_port: Option<IntOrText>,
}

/// Number or name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub(crate) enum IntOrText {
    Int(i32),
    Text(String),
}

/// `v1` Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodManifest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
    pub(crate) status: PodStatus,
}

/// `spec` of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodSpec {
    pub(crate) containers: Vec<Container>,
    pub(crate) init_containers: Vec<Container>,
    pub(crate) host_network: bool,
    pub(crate) node_name: String,
    pub(crate) restart_policy: Option<String>,
    pub(crate) security_context: SecurityContext,
    pub(crate) service_account: Option<String>,
    pub(crate) service_account_name: Option<String>,
    pub(crate) volumes: Vec<Volume>,
}

/// A container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Container {
    pub(crate) name: String,
    pub(crate) image: String,
    pub(crate) ports: Vec<ContainerPortManifest>,
    pub(crate) restart_policy: Option<String>,
    pub(crate) security_context: SecurityContext,
    pub(crate) liveness_probe: Option<ProbeManifest>,
    pub(crate) readiness_probe: Option<ProbeManifest>,
    pub(crate) startup_probe: Option<ProbeManifest>,
    pub(crate) volume_mounts: Vec<VolumeMount>,
}

/// Security settings of a pod or a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct SecurityContext {
    pub(crate) run_as_user: Option<i64>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ContainerPortManifest {
    pub(crate) container_port: i64,
    pub(crate) name: Option<String>,
    pub(crate) protocol: Option<String>,
}

/// Probe: its action and port.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ProbeManifest {
    pub(crate) exec: Option<Ignored>,
    pub(crate) grpc: Option<Ignored>,
    pub(crate) http_get: Option<ProbeTarget>,
    pub(crate) tcp_socket: Option<ProbeTarget>,
}

/// Target of a probe.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ProbeTarget {
    pub(crate) port: IntOrText,
}

/// A volume of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) config_map: Option<VolumeSource>,
    #[serde(rename = "downwardAPI")]
    pub(crate) downward: Option<VolumeSource>,
    pub(crate) empty_dir: Option<Ignored>,
    pub(crate) host_path: Option<Ignored>,
    pub(crate) persistent_volume_claim: Option<Ignored>,
    pub(crate) projected: Option<VolumeSource>,
    pub(crate) secret: Option<VolumeSource>,
}

/// Source of a volume's files: a ConfigMap, a Secret, fields of the Pod, or several of them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeSource {
    pub(crate) name: Option<String>,
    pub(crate) secret_name: Option<String>,
    pub(crate) default_mode: Option<i64>,
    pub(crate) items: Vec<VolumeItem>,
    pub(crate) sources: Vec<Projection>,
}

/// A file of a volume.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct VolumeItem {
    pub(crate) path: String,
    pub(crate) mode: Option<i64>,
}

/// Source of a projected volume.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Projection {
    pub(crate) config_map: Option<VolumeSource>,
    #[serde(rename = "downwardAPI")]
    pub(crate) downward: Option<VolumeSource>,
    pub(crate) secret: Option<VolumeSource>,
    pub(crate) service_account_token: Option<VolumeItem>,
}

/// Mount of a volume in a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct VolumeMount {
    pub(crate) name: String,
    pub(crate) mount_path: String,
    pub(crate) sub_path: Option<String>,
    pub(crate) sub_path_expr: Option<String>,
}

/// `status` of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodStatus {
    pub(crate) conditions: Vec<PodCondition>,
    pub(crate) phase: Option<String>,
    #[serde(rename = "podIP")]
    pub(crate) pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pub(crate) pod_ips: Vec<PodIp>,
}

/// A condition of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodCondition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
}

/// An address of a Pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodIp {
    pub(crate) ip: String,
}

/// Object that makes Pods: Deployment, StatefulSet, DaemonSet, ReplicaSet, Job.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct WorkloadManifest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: WorkloadSpec,
}

/// `spec` of an object that makes Pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct WorkloadSpec {
    pub(crate) replicas: Option<i64>,
    pub(crate) selector: Option<LabelSelector>,
    pub(crate) template: PodTemplate,
}

/// `batch/v1` CronJob.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CronJob {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: CronJobSpec,
}

/// `spec` of a CronJob.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct CronJobSpec {
    pub(crate) job_template: JobTemplate,
}

/// Template of a CronJob's Jobs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct JobTemplate {
    pub(crate) spec: WorkloadSpec,
}

/// Selector of a workload's Pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct LabelSelector {
    pub(crate) match_labels: Labels,
    pub(crate) match_expressions: Vec<Ignored>,
}

/// Template of a workload's Pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PodTemplate {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: PodSpec,
}

/// `discovery.k8s.io/v1` EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointSliceManifest {
    pub(crate) metadata: ObjectMeta,
    pub(crate) ports: Vec<EndpointPort>,
    pub(crate) endpoints: Vec<EndpointManifest>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointPort {
    pub(crate) name: Option<String>,
    pub(crate) port: Option<i32>,
}

/// An endpoint of an EndpointSlice.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct EndpointManifest {
    pub(crate) addresses: Vec<String>,
    pub(crate) conditions: EndpointConditions,
    pub(crate) node_name: Option<String>,
    pub(crate) target_ref: Option<EndpointTarget>,
    pub(crate) zone: Option<String>,
}

/// State of an endpoint.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointConditions {
    pub(crate) ready: Option<bool>,
    pub(crate) terminating: Option<bool>,
}

/// Reference to another object.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointTarget {
    pub(crate) kind: Option<String>,
    pub(crate) name: Option<String>,
}

/// Any value; its content is discarded.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(from = "serde::de::IgnoredAny")]
pub(crate) struct Ignored;

impl From<serde::de::IgnoredAny> for Ignored {
    fn from(_: serde::de::IgnoredAny) -> Self {
        Self
    }
}

#[cfg(test)]
mod tests {
    use crate::parse;

    #[test]
    fn an_object_as_a_cluster_has_it_is_accepted() {
        let metadata = "{name: a, namespace: b, uid: c, generation: 2, resourceVersion: '3', generateName: a-, \
            creationTimestamp: '2026-01-01T00:00:00Z', finalizers: [d], managedFields: [{manager: e}]}";
        for (kind, spec) in [
            (
                "gateway.networking.k8s.io/v1\nkind: Gateway",
                "{gatewayClassName: skysail, listeners: [{name: a, port: 80, protocol: HTTP}]}",
            ),
            (
                "networking.istio.io/v1\nkind: VirtualService",
                "{hosts: [a], http: [{route: [{destination: {host: a}}]}]}",
            ),
        ] {
            let text = format!(
                "apiVersion: {kind}\nmetadata: {metadata}\nspec: {spec}\nstatus: {{observedGeneration: 1}}\n"
            );
            let parsed = parse(&text, "a.yaml");
            assert_eq!(parsed.diagnostics, [], "{text}");
            assert_eq!(parsed.objects.len(), 1);
        }
    }
}

//! PeerAuthentication and AuthorizationPolicy. Fields are Istio's (`security.istio.io`).

use std::collections::BTreeMap;

use serde::Deserialize;

use super::destination_rule::WorkloadSelector;

/// `spec` of a PeerAuthentication.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PeerAuthentication {
    /// The workloads it holds for; unset means the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// What clients must do.
    pub mtls: Option<MutualTls>,
    /// The same for single ports of the workload; keys are port numbers.
    pub port_level_mtls: BTreeMap<String, MutualTls>,
}

/// `{mode: STRICT}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct MutualTls {
    /// What clients must do.
    pub mode: MtlsMode,
}

/// What clients must do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum MtlsMode {
    /// As the next wider policy says.
    #[default]
    Unset,
    /// Plain text only.
    Disable,
    /// Both are taken.
    Permissive,
    /// Mutual TLS only.
    Strict,
}

/// `spec` of an AuthorizationPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AuthorizationPolicy {
    /// The workloads it holds for; unset means the namespace, or the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// A Gateway or Service it is attached to.
    pub target_ref: Option<TargetRef>,
    /// The same for several.
    pub target_refs: Vec<TargetRef>,
    /// Any rule that matches makes the policy match. None: it never matches.
    pub rules: Vec<Rule>,
    /// What a match means.
    pub action: Action,
    /// Who decides, for `CUSTOM`.
    pub provider: Option<Provider>,
}

/// What a policy is attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct TargetRef {
    /// API group.
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
    /// Namespace.
    pub namespace: String,
}

/// What a match means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Action {
    /// Allowed; once a workload has such a policy, only what matches one is.
    #[default]
    Allow,
    /// Denied, before all ALLOW policies.
    Deny,
    /// Noted.
    Audit,
    /// Somebody else decides.
    Custom,
}

/// Who decides, for `CUSTOM`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Provider {
    /// A name in the mesh configuration.
    pub name: String,
}

/// One rule: any `from`, any `to`, every `when`. A rule without parts matches all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Rule {
    /// Who asks.
    pub from: Vec<From>,
    /// What for.
    pub to: Vec<To>,
    /// Under which conditions.
    pub when: Vec<Condition>,
}

/// `source:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct From {
    /// Who asks.
    pub source: Source,
}

/// `operation:`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct To {
    /// What for.
    pub operation: Operation,
}

/// Who asks; all fields given must hold. Values may be `text`, `text*`, `*text` or `*`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Source {
    /// `cluster.local/ns/default/sa/productpage`.
    pub principals: Vec<String>,
    /// None of these.
    pub not_principals: Vec<String>,
    /// `ISSUER/SUBJECT` of a token.
    pub request_principals: Vec<String>,
    /// None of these.
    pub not_request_principals: Vec<String>,
    /// Namespaces.
    pub namespaces: Vec<String>,
    /// None of these.
    pub not_namespaces: Vec<String>,
    /// `NAMESPACE/NAME`, or a name in the policy's namespace.
    pub service_accounts: Vec<String>,
    /// None of these.
    pub not_service_accounts: Vec<String>,
    /// Addresses of the connection.
    pub ip_blocks: Vec<String>,
    /// None of these.
    pub not_ip_blocks: Vec<String>,
    /// Addresses of the client, proxies aside.
    pub remote_ip_blocks: Vec<String>,
    /// None of these.
    pub not_remote_ip_blocks: Vec<String>,
    /// Trust domains.
    pub trust_domains: Vec<String>,
    /// None of these.
    pub not_trust_domains: Vec<String>,
}

/// What for; all fields given must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Operation {
    /// Hosts asked for, in any case.
    pub hosts: Vec<String>,
    /// None of these.
    pub not_hosts: Vec<String>,
    /// Ports of the workload.
    pub ports: Vec<String>,
    /// None of these.
    pub not_ports: Vec<String>,
    /// Methods.
    pub methods: Vec<String>,
    /// None of these.
    pub not_methods: Vec<String>,
    /// Paths, or templates with `{*}` and `{**}`.
    pub paths: Vec<String>,
    /// None of these.
    pub not_paths: Vec<String>,
}

/// A condition on an attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    /// The attribute, `request.headers[x-a]`.
    pub key: String,
    /// Any of these.
    pub values: Vec<String>,
    /// None of these.
    pub not_values: Vec<String>,
}

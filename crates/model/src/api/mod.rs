//! Typed objects of the Kubernetes and Istio kinds that the mesh uses.
//!
//! Istio's kinds mirror Istio's API field by field. Kubernetes' kinds are reduced to the fields that a mesh uses, since
//! a large mesh has tens of thousands of Pods.

pub mod destination_rule;
pub mod kube;
pub(crate) mod manifest;
pub mod mesh_config;
pub mod security;
pub mod service_entry;
pub mod value;
pub mod virtual_service;

use std::{collections::BTreeMap, fmt, sync::Arc};

pub use destination_rule::{DestinationRule, Subset, TrafficPolicy};
pub use kube::{EndpointSlice, Node, Pod, Protocol, Service, ServicePort, Template};
pub use mesh_config::{ConfigMap, MeshConfig};
pub use security::{AuthorizationPolicy, MtlsMode, PeerAuthentication};
pub use service_entry::{Address, EntryHost, Resolution, ServiceEntry};
pub use value::{Duration, StringMatch};
pub use virtual_service::VirtualService;

/// Labels or annotations.
pub type Labels = BTreeMap<String, String>;

/// Returns whether `labels` has every label of `selector`; the empty selector matches all.
pub fn selects(selector: &Labels, labels: &Labels) -> bool {
    selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Kinds that the mesh uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `v1` Namespace.
    Namespace,
    /// `v1` Node.
    Node,
    /// `v1` Service.
    Service,
    /// `v1` ServiceAccount.
    ServiceAccount,
    /// `v1` Pod.
    Pod,
    /// `v1` Secret; only checked.
    Secret,
    /// `apps/v1` Deployment.
    Deployment,
    /// `apps/v1` StatefulSet.
    StatefulSet,
    /// `apps/v1` DaemonSet.
    DaemonSet,
    /// `apps/v1` ReplicaSet.
    ReplicaSet,
    /// `batch/v1` Job.
    Job,
    /// `batch/v1` CronJob.
    CronJob,
    /// `discovery.k8s.io/v1` EndpointSlice.
    EndpointSlice,
    /// `v1` ConfigMap; only the mesh configuration and allocated addresses are used.
    ConfigMap,
    /// `networking.istio.io` VirtualService.
    VirtualService,
    /// `networking.istio.io` DestinationRule.
    DestinationRule,
    /// `networking.istio.io` ServiceEntry.
    ServiceEntry,
    /// `security.istio.io` PeerAuthentication.
    PeerAuthentication,
    /// `security.istio.io` AuthorizationPolicy.
    AuthorizationPolicy,
}

impl Kind {
    /// Returns the kind as written in YAML.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Service => "Service",
            Self::ServiceAccount => "ServiceAccount",
            Self::Pod => "Pod",
            Self::Secret => "Secret",
            Self::Deployment => "Deployment",
            Self::StatefulSet => "StatefulSet",
            Self::DaemonSet => "DaemonSet",
            Self::ReplicaSet => "ReplicaSet",
            Self::Job => "Job",
            Self::CronJob => "CronJob",
            Self::EndpointSlice => "EndpointSlice",
            Self::ConfigMap => "ConfigMap",
            Self::VirtualService => "VirtualService",
            Self::DestinationRule => "DestinationRule",
            Self::ServiceEntry => "ServiceEntry",
            Self::PeerAuthentication => "PeerAuthentication",
            Self::AuthorizationPolicy => "AuthorizationPolicy",
        }
    }

    /// Returns the field in which an object that makes Pods names their service account.
    pub(crate) const fn account_field(self) -> &'static str {
        match self {
            Self::CronJob => "spec.jobTemplate.spec.template.spec.serviceAccountName",
            _ => "spec.template.spec.serviceAccountName",
        }
    }

    /// Returns whether the kind restricts requests.
    pub const fn is_policy(self) -> bool {
        matches!(self, Self::PeerAuthentication | Self::AuthorizationPolicy)
    }

    /// Returns whether objects of the kind have a namespace.
    pub const fn is_namespaced(self) -> bool {
        !matches!(self, Self::Namespace | Self::Node)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Kind, namespace and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// Kind.
    pub kind: Kind,
    /// Namespace; empty for kinds without one.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
        }
    }
}

/// Metadata that all objects have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Namespace; empty for kinds without one.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Labels; objects of one file with equal labels share them.
    pub labels: Arc<Labels>,
    /// Annotations that affect the mesh (`*istio.io/*`).
    pub annotations: Labels,
    /// `creationTimestamp` in seconds since 1970, if present.
    pub created: Option<i64>,
}

/// An object of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Typed<T> {
    /// Name, namespace, labels.
    pub meta: Meta,
    /// Specification.
    pub spec: T,
}

/// An object of any kind. Clones share the content.
#[derive(Clone, Debug, PartialEq)]
pub enum Object {
    /// A Namespace, reduced to its labels.
    Namespace(Arc<Typed<()>>),
    /// A Node, for the locality of its pods.
    Node(Arc<Typed<Node>>),
    /// A Service.
    Service(Arc<Typed<Service>>),
    /// A ServiceAccount.
    ServiceAccount(Arc<Typed<()>>),
    /// A Pod.
    Pod(Arc<Typed<Pod>>),
    /// A Secret, without its data.
    Secret(Arc<Typed<()>>),
    /// An object that makes Pods.
    Template(Arc<Typed<Template>>),
    /// An EndpointSlice.
    EndpointSlice(Arc<Typed<EndpointSlice>>),
    /// The mesh configuration, addresses of hosts, or another ConfigMap.
    ConfigMap(Arc<Typed<ConfigMap>>),
    /// A VirtualService.
    VirtualService(Arc<Typed<VirtualService>>),
    /// A DestinationRule.
    DestinationRule(Arc<Typed<DestinationRule>>),
    /// A ServiceEntry.
    ServiceEntry(Arc<Typed<ServiceEntry>>),
    /// A PeerAuthentication.
    PeerAuthentication(Arc<Typed<PeerAuthentication>>),
    /// An AuthorizationPolicy.
    AuthorizationPolicy(Arc<Typed<AuthorizationPolicy>>),
}

impl Object {
    /// Returns the kind.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Namespace(_) => Kind::Namespace,
            Self::Node(_) => Kind::Node,
            Self::Service(_) => Kind::Service,
            Self::ServiceAccount(_) => Kind::ServiceAccount,
            Self::Pod(_) => Kind::Pod,
            Self::Secret(_) => Kind::Secret,
            Self::Template(object) => object.spec.kind,
            Self::EndpointSlice(_) => Kind::EndpointSlice,
            Self::ConfigMap(_) => Kind::ConfigMap,
            Self::VirtualService(_) => Kind::VirtualService,
            Self::DestinationRule(_) => Kind::DestinationRule,
            Self::ServiceEntry(_) => Kind::ServiceEntry,
            Self::PeerAuthentication(_) => Kind::PeerAuthentication,
            Self::AuthorizationPolicy(_) => Kind::AuthorizationPolicy,
        }
    }

    /// Returns the metadata.
    pub fn meta(&self) -> &Meta {
        match self {
            Self::Namespace(object) | Self::ServiceAccount(object) | Self::Secret(object) => &object.meta,
            Self::Node(object) => &object.meta,
            Self::Service(object) => &object.meta,
            Self::Pod(object) => &object.meta,
            Self::Template(object) => &object.meta,
            Self::EndpointSlice(object) => &object.meta,
            Self::ConfigMap(object) => &object.meta,
            Self::VirtualService(object) => &object.meta,
            Self::DestinationRule(object) => &object.meta,
            Self::ServiceEntry(object) => &object.meta,
            Self::PeerAuthentication(object) => &object.meta,
            Self::AuthorizationPolicy(object) => &object.meta,
        }
    }

    /// Returns the metadata; `None` if the object is shared.
    pub(crate) fn meta_mut(&mut self) -> Option<&mut Meta> {
        Some(match self {
            Self::Namespace(object) | Self::ServiceAccount(object) | Self::Secret(object) => {
                &mut Arc::get_mut(object)?.meta
            }
            Self::Node(object) => &mut Arc::get_mut(object)?.meta,
            Self::Service(object) => &mut Arc::get_mut(object)?.meta,
            Self::Pod(object) => &mut Arc::get_mut(object)?.meta,
            Self::Template(object) => &mut Arc::get_mut(object)?.meta,
            Self::EndpointSlice(object) => &mut Arc::get_mut(object)?.meta,
            Self::ConfigMap(object) => &mut Arc::get_mut(object)?.meta,
            Self::VirtualService(object) => &mut Arc::get_mut(object)?.meta,
            Self::DestinationRule(object) => &mut Arc::get_mut(object)?.meta,
            Self::ServiceEntry(object) => &mut Arc::get_mut(object)?.meta,
            Self::PeerAuthentication(object) => &mut Arc::get_mut(object)?.meta,
            Self::AuthorizationPolicy(object) => &mut Arc::get_mut(object)?.meta,
        })
    }

    /// Returns the key of the object.
    pub fn key(&self) -> ObjectKey {
        let meta = self.meta();
        ObjectKey { kind: self.kind(), namespace: meta.namespace.clone(), name: meta.name.clone() }
    }
}

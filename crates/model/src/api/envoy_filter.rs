//! EnvoyFilter. Fields are Istio's (`networking.istio.io`).

use std::{collections::BTreeMap, sync::OnceLock};

use prost_reflect::DynamicMessage;
use regex::bytes::Regex;
use serde::Deserialize;
use skysail_core::re2;

use super::{security::TargetRef, value::WorkloadLabels};
use crate::reflect::{self, FromJson, TypeMismatch};

/// Maximum length of `proxyVersion` in bytes, as in Istio; a longer expression matches no proxy.
pub const MAX_VERSION: usize = 1_024;

/// `spec` of an EnvoyFilter.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EnvoyFilter {
    /// Workloads by label; absent: all of the namespace, or of the mesh in the root namespace.
    pub workload_selector: Option<WorkloadLabels>,
    /// Gateways by name.
    pub target_refs: Vec<TargetRef>,
    /// Order of application: lower numbers first.
    pub priority: i32,
    /// Patches in the order of application.
    pub config_patches: Vec<ConfigPatch>,
}

/// A patch.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ConfigPatch {
    /// Kind of the patched part.
    pub apply_to: ApplyTo,
    /// Condition.
    #[serde(rename = "match")]
    pub matched: Match,
    /// Operation and value.
    pub patch: Option<Patch>,
    /// Value as a message, built on its first use.
    #[serde(skip)]
    built: Cached<Option<DynamicMessage>>,
    /// Expression of `proxyVersion`, compiled on its first use.
    #[serde(skip)]
    version: Cached<Option<Regex>>,
}

/// Kind of the patched part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "each variant is Istio's value of the same name")]
pub enum ApplyTo {
    #[default]
    Invalid,
    Listener,
    FilterChain,
    NetworkFilter,
    HttpFilter,
    RouteConfiguration,
    VirtualHost,
    HttpRoute,
    Cluster,
    ExtensionConfig,
    Bootstrap,
    ListenerFilter,
}

impl ApplyTo {
    /// Returns the name as written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "INVALID",
            Self::Listener => "LISTENER",
            Self::FilterChain => "FILTER_CHAIN",
            Self::NetworkFilter => "NETWORK_FILTER",
            Self::HttpFilter => "HTTP_FILTER",
            Self::RouteConfiguration => "ROUTE_CONFIGURATION",
            Self::VirtualHost => "VIRTUAL_HOST",
            Self::HttpRoute => "HTTP_ROUTE",
            Self::Cluster => "CLUSTER",
            Self::ExtensionConfig => "EXTENSION_CONFIG",
            Self::Bootstrap => "BOOTSTRAP",
            Self::ListenerFilter => "LISTENER_FILTER",
        }
    }

    /// Returns the full name of the message that `patch.value` is.
    pub const fn message(self) -> Option<&'static str> {
        Some(match self {
            Self::Invalid => return None,
            Self::Listener => "envoy.config.listener.v3.Listener",
            Self::FilterChain => "envoy.config.listener.v3.FilterChain",
            Self::NetworkFilter => "envoy.config.listener.v3.Filter",
            Self::HttpFilter => "envoy.extensions.filters.network.http_connection_manager.v3.HttpFilter",
            Self::RouteConfiguration => "envoy.config.route.v3.RouteConfiguration",
            Self::VirtualHost => "envoy.config.route.v3.VirtualHost",
            Self::HttpRoute => "envoy.config.route.v3.Route",
            Self::Cluster => "envoy.config.cluster.v3.Cluster",
            Self::ExtensionConfig => "envoy.config.core.v3.TypedExtensionConfig",
            Self::Bootstrap => "envoy.config.bootstrap.v3.Bootstrap",
            Self::ListenerFilter => "envoy.config.listener.v3.ListenerFilter",
        })
    }

    /// Returns whether the patched part belongs to resources that proxies of a scope share.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Cluster | Self::RouteConfiguration | Self::VirtualHost | Self::HttpRoute)
    }

    /// Returns whether the patched part stands in an ordered list, in which `INSERT_*` choose a place.
    pub const fn is_ordered(self) -> bool {
        matches!(self, Self::HttpFilter | Self::NetworkFilter | Self::HttpRoute | Self::ListenerFilter)
    }
}

/// Condition of a patch.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Match {
    /// Role of the proxy and direction of the traffic.
    pub context: Context,
    /// Properties of the proxy.
    pub proxy: Option<ProxyMatch>,
    /// Listener, for listeners and their parts.
    pub listener: Option<ListenerMatch>,
    /// Route configuration, for routes and their parts.
    pub route_configuration: Option<RouteConfigurationMatch>,
    /// Cluster.
    pub cluster: Option<ClusterMatch>,
    /// Waypoint; there are none.
    pub waypoint: Option<serde_json::Value>,
}

/// Role of the proxy and direction of the traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Context {
    /// All.
    #[default]
    Any,
    /// Requests to the workload.
    SidecarInbound,
    /// Requests of the workload.
    SidecarOutbound,
    /// Gateways.
    Gateway,
    /// Waypoints; there are none.
    Waypoint,
}

/// Properties of a proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyMatch {
    /// Expression for the version; empty: any.
    pub proxy_version: String,
    /// Metadata of the node that must be equal.
    pub metadata: BTreeMap<String, String>,
}

/// Condition on a listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ListenerMatch {
    /// Port; 0: any.
    pub port_number: u32,
    /// Without effect, as in Istio.
    pub port_name: String,
    /// Filter chain.
    pub filter_chain: Option<FilterChainMatch>,
    /// Name of a listener filter; empty: any.
    pub listener_filter: String,
    /// Name; empty: any.
    pub name: String,
}

/// Condition on a filter chain. Empty fields match all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FilterChainMatch {
    /// Name.
    pub name: String,
    /// Server name.
    pub sni: String,
    /// Transport protocol.
    pub transport_protocol: String,
    /// Application protocols, separated by commas.
    pub application_protocols: String,
    /// Network filter.
    pub filter: Option<FilterMatch>,
    /// Destination port; 0: any.
    pub destination_port: u32,
}

/// Condition on a network filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FilterMatch {
    /// Name.
    pub name: String,
    /// HTTP filter within it.
    pub sub_filter: Option<SubFilterMatch>,
}

/// Condition on an HTTP filter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SubFilterMatch {
    /// Name.
    pub name: String,
}

/// Condition on a route configuration. Empty fields match all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteConfigurationMatch {
    /// Port of the service or gateway; 0: any.
    pub port_number: u32,
    /// Name of the gateway's port.
    pub port_name: String,
    /// Gateway as `namespace/name`.
    pub gateway: String,
    /// Virtual host.
    pub vhost: Option<VirtualHostMatch>,
    /// Name.
    pub name: String,
}

/// Condition on a virtual host. Empty fields match all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VirtualHostMatch {
    /// Name.
    pub name: String,
    /// Route.
    pub route: Option<RouteMatch>,
    /// One of its domains.
    pub domain_name: String,
}

/// Condition on a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteMatch {
    /// Name; empty: any.
    pub name: String,
    /// Action.
    pub action: RouteActionMatch,
}

/// Action of a route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "each variant is Istio's value of the same name")]
pub enum RouteActionMatch {
    #[default]
    Any,
    Route,
    Redirect,
    DirectResponse,
}

/// Condition on a cluster. Empty fields match all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClusterMatch {
    /// Port of the service; 0: any.
    pub port_number: u32,
    /// Full host name of the service.
    pub service: String,
    /// Subset.
    pub subset: String,
    /// Name; the other fields have no effect then.
    pub name: String,
}

/// Operation and value.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Patch {
    /// Operation.
    pub operation: PatchOperation,
    /// Value: a message of Envoy as JSON; absent for `REMOVE`.
    pub value: Option<serde_json::Value>,
    /// Without effect, as in Istio.
    pub filter_class: FilterClass,
}

/// Operation of a patch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "each variant is Istio's value of the same name")]
pub enum PatchOperation {
    #[default]
    Invalid,
    Merge,
    Add,
    Remove,
    InsertBefore,
    InsertAfter,
    InsertFirst,
    Replace,
    MergeAndReplaceList,
}

impl PatchOperation {
    /// Returns the name as written.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "INVALID",
            Self::Merge => "MERGE",
            Self::Add => "ADD",
            Self::Remove => "REMOVE",
            Self::InsertBefore => "INSERT_BEFORE",
            Self::InsertAfter => "INSERT_AFTER",
            Self::InsertFirst => "INSERT_FIRST",
            Self::Replace => "REPLACE",
            Self::MergeAndReplaceList => "MERGE_AND_REPLACE_LIST",
        }
    }
}

/// Place of a filter among those of the mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[expect(missing_docs, reason = "each variant is Istio's value of the same name")]
pub enum FilterClass {
    #[default]
    Unspecified,
    Authn,
    Authz,
    Stats,
}

impl ConfigPatch {
    /// Returns the operation. As in Istio, `INSERT_*` outside of ordered lists are `ADD`.
    pub fn operation(&self) -> PatchOperation {
        let operation = self.patch.as_ref().map_or(PatchOperation::Invalid, |patch| patch.operation);
        match operation {
            PatchOperation::InsertAfter | PatchOperation::InsertBefore | PatchOperation::InsertFirst
                if !self.apply_to.is_ordered() =>
            {
                PatchOperation::Add
            }
            operation => operation,
        }
    }

    /// Returns the value as a message; `None` without a value, or if it is invalid.
    pub(crate) fn value(&self) -> Option<&DynamicMessage> {
        let build = || self.build().ok().flatten().map(|built| built.message);
        self.built.0.get_or_init(build).as_ref()
    }

    /// Converts the value to a message.
    ///
    /// # Errors
    /// Fails if the value is not a message of the patched part.
    pub(crate) fn build(&self) -> Result<Option<FromJson>, TypeMismatch> {
        let value = self.patch.as_ref().and_then(|patch| patch.value.as_ref());
        let descriptor = self.apply_to.message().and_then(reflect::descriptor);
        let (Some(value), Some(descriptor)) = (value, descriptor) else { return Ok(None) };
        reflect::from_json(&descriptor, value).map(Some)
    }

    fn listener_filter(&self) -> Option<&FilterMatch> {
        self.matched.listener.as_ref()?.filter_chain.as_ref()?.filter.as_ref()
    }

    /// Returns whether the match names a network filter.
    pub(crate) fn has_filter_match(&self) -> bool {
        self.listener_filter().is_some()
    }

    /// Returns whether the match names an HTTP filter.
    pub(crate) fn has_sub_filter_match(&self) -> bool {
        self.listener_filter().is_some_and(|filter| filter.sub_filter.is_some())
    }

    /// Returns whether the match names a listener filter.
    pub(crate) fn has_listener_filter_match(&self) -> bool {
        self.matched.listener.as_ref().is_some_and(|listener| !listener.listener_filter.is_empty())
    }

    /// Returns whether a network filter of this name matches.
    pub(crate) fn takes_filter(&self, name: &str) -> bool {
        self.listener_filter().is_none_or(|filter| filter.name == name)
    }

    /// Returns whether an HTTP filter of this name matches.
    pub(crate) fn takes_sub_filter(&self, name: &str) -> bool {
        let within = self.listener_filter().and_then(|filter| filter.sub_filter.as_ref());
        within.is_none_or(|within| within.name == name)
    }

    /// Returns whether a listener filter of this name matches.
    pub(crate) fn takes_listener_filter(&self, name: &str) -> bool {
        let listener = self.matched.listener.as_ref();
        listener
            .is_none_or(|listener| listener.listener_filter.is_empty() || listener.listener_filter == name)
    }

    /// Returns whether the patch applies to proxies with these metadata.
    pub(crate) fn takes(&self, metadata: &BTreeMap<String, String>) -> bool {
        let Some(proxy) = &self.matched.proxy else { return true };
        let of = |key: &str| metadata.get(key).map_or("", String::as_str);
        let expression = &proxy.proxy_version;
        let takes_version = expression.is_empty() || {
            let compile =
                || (expression.len() <= MAX_VERSION).then(|| re2::compile(expression).ok()).flatten();
            let version = of(VERSION);
            let compiled = self.version.0.get_or_init(compile).as_ref();
            !version.is_empty() && compiled.is_some_and(|compiled| compiled.is_match(version.as_bytes()))
        };
        takes_version
            && proxy.metadata.iter().all(|(key, value)| metadata.contains_key(key) && of(key) == value)
    }

    /// Returns the keys of the metadata that the patch compares.
    pub(crate) fn metadata_keys(&self) -> impl Iterator<Item = &str> {
        let proxy = self.matched.proxy.iter();
        proxy.flat_map(|proxy| {
            let version = (!proxy.proxy_version.is_empty()).then_some(VERSION);
            version.into_iter().chain(proxy.metadata.keys().map(String::as_str))
        })
    }
}

/// Key of the version among the metadata of a proxy.
const VERSION: &str = "ISTIO_VERSION";

/// A value computed from the other fields, which therefore never distinguishes two objects.
#[derive(Clone, Debug)]
struct Cached<T>(OnceLock<T>);

impl<T> Default for Cached<T> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<T> PartialEq for Cached<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

//! Translation of Envoy's protos into the types of the request path.
//!
//! Resources are translated one at a time, and an invalid one is rejected alone, with the path of the field and
//! the reason. First [`coverage`] walks the encoded message and reports every unsupported field, so that
//! nothing is ignored silently. Then the module of the resource's kind translates it.

pub(crate) mod bootstrap;

mod access_log;
mod authorization;
mod balancer;
mod cluster;
mod collector;
mod compressor;
mod coverage;
mod decompressor;
mod distinct;
mod dynamic;
mod endpoints;
mod global_limit;
mod http;
mod jwt;
mod lb_policy;
mod limit;
mod limit_rules;
mod listener;
mod local_reply;
mod lua;
mod mutation;
mod outlier;
mod policy;
mod processing;
mod route;
mod route_filters;
mod stats;
mod text;
mod tls;
mod tls_context;
mod tls_params;
mod trace;
mod validation;

use prost::Name;
use std::{
    borrow::Cow,
    collections::HashSet,
    fmt,
    hash::{DefaultHasher, Hash, Hasher as _},
    sync::{Arc, Mutex},
    time::Duration,
};

use skysail_identity::Identity;
use skysail_proto::Codec;
use skysail_xds::envoy::pb::{
    envoy::config::{
        cluster::v3::Cluster as ClusterProto, core::v3::Node, endpoint::v3::ClusterLoadAssignment,
        listener::v3::Listener as ListenerProto, route::v3::RouteConfiguration,
    },
    envoy::extensions::transport_sockets::tls::v3::{CertificateValidationContext, Secret, secret},
    google::protobuf::{Any, BoolValue, Duration as DurationProto, UInt32Value},
};

pub(crate) use route::{domains, uses_vhds};
use skysail_policy::config::{Cluster, Endpoints, Listener, RouteTable, tls::ClientTls};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use text::format;
pub(crate) use tls::{
    ISTIO_H2, ISTIO_HTTP1, SecretName, SecretSource, TlsContexts, client_ready, server_ready,
};

/// Reason why a resource is rejected.
#[derive(Debug)]
pub(crate) struct Reject {
    /// Path of the field, such as `filter_chains[0].filters[1].typed_config`; empty for the whole resource.
    path: String,
    reason: String,
}

impl Reject {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { path: String::new(), reason: reason.into() }
    }

    /// Prepends a field name to the path.
    fn at_field(mut self, field: impl fmt::Display) -> Self {
        self.path = match self.path.as_str() {
            "" => field.to_string(),
            inner if inner.starts_with('[') => format!("{field}{inner}"),
            inner => format!("{field}.{inner}"),
        };
        self
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => f.write_str(&self.reason),
            path => write!(f, "{path}: {}", self.reason),
        }
    }
}

impl std::error::Error for Reject {}

/// Result of a translation.
pub(crate) type Result<T> = std::result::Result<T, Reject>;

/// Adds field names to the path of an error.
trait At<T> {
    fn at(self, field: impl fmt::Display) -> Result<T>;
}

impl<T> At<T> for Result<T> {
    fn at(self, field: impl fmt::Display) -> Self {
        self.map_err(|reject| reject.at_field(field))
    }
}

/// Translates resources.
#[derive(Clone, Copy)]
pub(crate) struct Translator<'a> {
    /// Source of certificates for TLS contexts.
    pub(crate) tls: &'a TlsContexts,
    /// The sidecar's node, which collectors receive.
    pub(crate) node: &'a Node,
    /// Refuse fields that are otherwise only warned about. Set for files, which are written for this sidecar.
    pub(crate) strict: bool,
}

impl Translator<'_> {
    /// Translates a cluster with its inline endpoints.
    pub(crate) fn cluster(self, body: &[u8]) -> Result<Cluster> {
        cluster::translate(self, self.decode::<ClusterProto>(body)?)
    }

    /// Translates the endpoints of a cluster.
    pub(crate) fn endpoints(self, body: &[u8], cluster: &Cluster) -> Result<Endpoints> {
        endpoints::translate(&self.decode::<ClusterLoadAssignment>(body)?, cluster)
    }

    /// Translates a listener.
    pub(crate) fn listener(self, body: &[u8]) -> Result<Listener> {
        listener::translate(self, self.decode::<ListenerProto>(body)?)
    }

    /// Translates a route table.
    pub(crate) fn routes(self, body: &[u8]) -> Result<RouteTable> {
        route::translate(&self.decode::<RouteConfiguration>(body)?, false)
    }

    /// Translates the upstream TLS settings of a cluster, if it has any.
    pub(crate) fn client_tls(self, proto: &ClusterProto) -> Result<Option<Arc<ClientTls>>> {
        if cluster::proxy_protocol(proto)?.is_some() {
            return Err(Reject::new("must not be upstream_proxy_protocol here").at_field("transport_socket"));
        }
        cluster::transport(self, proto.transport_socket.as_ref(), false).at("transport_socket")
    }

    /// Decodes a message after checking all its fields, those of nested `Any`s too.
    pub(crate) fn decode<M: Codec + Name>(self, body: &[u8]) -> Result<M> {
        let mut checked = coverage::check(&M::full_name(), body);
        let mut body = Cow::Borrowed(body);
        if checked.has_typed_structs {
            // The messages in typed structs are checked and decoded as if they had been sent in binary form.
            body = Cow::Owned(coverage::unwrapped(&M::full_name(), &body)?);
            checked = coverage::check(&M::full_name(), &body);
        }
        for finding in checked.findings {
            if finding.refused || self.strict {
                return Err(Reject {
                    path: finding.path,
                    reason: format!(
                        "skysail-proxy does not support field {} of {}: remove it",
                        finding.field, finding.message
                    ),
                });
            }
            warn_once(format!(
                "{}: field {} of {} is not supported and has no effect",
                finding.path, finding.field, finding.message
            ));
        }
        if let Some(violation) = checked.violations.into_iter().next() {
            return Err(Reject { path: violation.path, reason: violation.reason });
        }
        M::from_slice(&body).map_err(|error| Reject::new(format!("not a valid {}: {error}", M::NAME)))
    }
}

/// Stores a secret in its handle; returns the certificate if it is one.
pub(crate) fn store_secret(
    tls: &TlsContexts,
    name: &SecretName,
    secret: &Secret,
) -> Result<Option<Arc<Identity>>> {
    match &secret.r#type {
        Some(secret::Type::TlsCertificate(certificate)) => {
            let identity = Arc::new(tls_context::identity(certificate).at("tls_certificate")?);
            tls.identity(name).set(Arc::clone(&identity));
            Ok(Some(identity))
        }
        Some(secret::Type::ValidationContext(CertificateValidationContext { crl: Some(crl), .. }))
            if matches!(name.source, SecretSource::CrlFile { .. }) =>
        {
            tls.set_crls(name, validation::read_crls(crl)?);
            Ok(None)
        }
        Some(secret::Type::ValidationContext(context)) => {
            let roots = validation::secret_roots(context).at("validation_context")?;
            tls.set_roots(name, roots);
            Ok(None)
        }
        _ => Err(Reject::new("only certificates and validation contexts are supported")),
    }
}

/// Returns IP address and port.
pub(crate) fn ip_and_port(
    address: &skysail_xds::envoy::pb::envoy::config::core::v3::Address,
) -> Result<std::net::SocketAddr> {
    endpoints::ip_and_port(Some(address))
}

/// Logs a warning once, so that a mesh of many clusters does not repeat it for each.
fn warn_once(warning: String) {
    static WARNED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    // Paths differ only in their indices; a warning about one element of a list applies to all.
    let key: String = warning.chars().filter(|c| !c.is_ascii_digit()).collect();
    let mut warned = WARNED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if warned.get_or_insert_default().insert(key) {
        tracing::warn!("{warning}");
    }
}

/// Returns a hash that is equal for equal configurations.
fn fingerprint(message: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.hash(&mut hasher);
    hasher.finish()
}

/// Decodes the message of an `Any`. Its fields were checked together with the enclosing message.
fn unpack<M: Codec + Name>(any: &Any) -> Result<M> {
    if type_name(any) != M::full_name() {
        return Err(Reject::new(format!("is a {}, must be a {}", type_name(any), M::full_name())));
    }
    M::from_slice(&any.value).map_err(|error| Reject::new(format!("not a valid {}: {error}", M::NAME)))
}

/// Returns the full name of the message in an `Any`.
fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// Returns the error for an unsupported extension type.
fn unknown_type(what: &str, name: &str, any: &Any) -> Reject {
    Reject::new(format!("skysail-proxy has no {what} {name:?} of type {}: remove it", type_name(any)))
}

/// Returns the number in a wrapper.
fn number(wrapped: Option<UInt32Value>) -> Option<u32> {
    wrapped.map(|wrapped| wrapped.value)
}

/// Returns the boolean in a wrapper.
fn flag(wrapped: Option<BoolValue>) -> Option<bool> {
    wrapped.map(|wrapped| wrapped.value)
}

/// Maximum duration, from the definition of `google.protobuf.Duration`: adding it to the current time does not
/// overflow.
const MAX_SECONDS: u64 = 315_576_000_000;

/// Translates a duration; refuses negative ones.
fn duration(proto: &DurationProto) -> Result<Duration> {
    let (Ok(seconds), Ok(nanos)) = (u64::try_from(proto.seconds), u32::try_from(proto.nanos)) else {
        return Err(Reject::new("a duration must not be negative"));
    };
    Ok(Duration::new(seconds.min(MAX_SECONDS), nanos.min(999_999_999)))
}

/// Translates a timeout of which zero means none; returns `default` if unset.
fn timeout(proto: Option<&DurationProto>, default: Option<Duration>) -> Result<Option<Duration>> {
    match proto {
        Some(proto) => Ok(Some(duration(proto)?).filter(|time| !time.is_zero())),
        None => Ok(default),
    }
}

#[cfg(test)]
mod tests;

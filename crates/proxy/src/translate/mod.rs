//! From Envoy's protos to the types the request path runs on.
//!
//! One resource is translated at a time, and a bad one is refused alone, with the path of the field and what is
//! wrong. First [`coverage`] walks the encoded message and names every field we do not take, so that nothing is
//! left out in silence; then the module of its kind turns it into our types.

pub(crate) mod bootstrap;

mod access_log;
mod authorization;
mod balancer;
mod cluster;
mod collector;
mod compressor;
mod coverage;
mod endpoints;
mod http;
mod jwt;
mod lb_policy;
mod limit;
mod listener;
mod outlier;
mod policy;
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

pub(crate) use route::{domains, has_hosts_apart};
use skysail_policy::config::{Cluster, Endpoints, Listener, RouteTable, tls::ClientTls};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use text::format;
pub(crate) use tls::{SecretName, SecretSource, TlsContexts, client_ready, server_ready};

/// Why a resource is refused.
#[derive(Debug)]
pub(crate) struct Reject {
    /// `filter_chains[0].filters[1].typed_config`; empty for the whole resource.
    path: String,
    reason: String,
}

impl Reject {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self { path: String::new(), reason: reason.into() }
    }

    /// Puts the name of a field before the path.
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

/// The outcome of a translation.
pub(crate) type Result<T> = std::result::Result<T, Reject>;

/// Puts the name of a field before an error's path.
trait At<T> {
    fn at(self, field: impl fmt::Display) -> Result<T>;
}

impl<T> At<T> for Result<T> {
    fn at(self, field: impl fmt::Display) -> Self {
        self.map_err(|reject| reject.at_field(field))
    }
}

/// Turns resources into our types.
#[derive(Clone, Copy)]
pub(crate) struct Translator<'a> {
    /// Where TLS contexts get their certificates from.
    pub(crate) tls: &'a TlsContexts,
    /// Who we are, as collectors are told.
    pub(crate) node: &'a Node,
    /// Whether a field that would only be warned about is refused: so with files, which somebody wrote for us.
    pub(crate) strict: bool,
}

impl Translator<'_> {
    /// A cluster with the endpoints that came with it.
    pub(crate) fn cluster(self, body: &[u8]) -> Result<Cluster> {
        cluster::translate(self, self.decode::<ClusterProto>(body)?)
    }

    /// The endpoints of a cluster.
    pub(crate) fn endpoints(self, body: &[u8], cluster: &Cluster) -> Result<Endpoints> {
        endpoints::translate(&self.decode::<ClusterLoadAssignment>(body)?, cluster)
    }

    /// A listener.
    pub(crate) fn listener(self, body: &[u8]) -> Result<Listener> {
        listener::translate(self, self.decode::<ListenerProto>(body)?)
    }

    /// A route table.
    pub(crate) fn routes(self, body: &[u8]) -> Result<RouteTable> {
        route::translate(&self.decode::<RouteConfiguration>(body)?)
    }

    /// The TLS towards a cluster, if it has any.
    pub(crate) fn client_tls(self, proto: &ClusterProto) -> Result<Option<Arc<ClientTls>>> {
        if cluster::proxy_protocol(proto)?.is_some() {
            return Err(Reject::new("must not be upstream_proxy_protocol here").at_field("transport_socket"));
        }
        cluster::transport(self, proto.transport_socket.as_ref(), false).at("transport_socket")
    }

    /// Decodes a message after a look at all its fields, those in its `Any`s too.
    pub(crate) fn decode<M: Codec + Name>(self, body: &[u8]) -> Result<M> {
        for finding in coverage::check(&M::full_name(), body) {
            if finding.refused || self.strict {
                return Err(Reject {
                    path: finding.path,
                    reason: format!(
                        "skysail-proxy does not support field {} of {}: take it out",
                        finding.field, finding.message
                    ),
                });
            }
            warn_once(format!(
                "{}: field {} of {} is not supported and has no effect",
                finding.path, finding.field, finding.message
            ));
        }
        M::from_slice(body).map_err(|error| Reject::new(format!("not a valid {}: {error}", M::NAME)))
    }
}

/// Puts a secret into its handle; gives the certificate if it is one.
pub(crate) fn take_secret(
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

/// An address of IP and port.
pub(crate) fn ip_and_port(
    address: &skysail_xds::envoy::pb::envoy::config::core::v3::Address,
) -> Result<std::net::SocketAddr> {
    endpoints::ip_and_port(Some(address))
}

/// Logs a warning the first time it comes up, so that a mesh of many clusters does not repeat it for each.
fn warn_once(warning: String) {
    static SAID: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    // Paths differ by their indices only; what is said about one of a list holds for all.
    let key: String = warning.chars().filter(|c| !c.is_ascii_digit()).collect();
    let mut said = SAID.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if said.get_or_insert_default().insert(key) {
        tracing::warn!("{warning}");
    }
}

/// A number that equal configurations have in common.
fn fingerprint(message: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    message.hash(&mut hasher);
    hasher.finish()
}

/// The message inside an `Any`; its fields have been looked at with the message around it.
fn unpack<M: Codec + Name>(any: &Any) -> Result<M> {
    if type_name(any) != M::full_name() {
        return Err(Reject::new(format!("is a {}, must be a {}", type_name(any), M::full_name())));
    }
    M::from_slice(&any.value).map_err(|error| Reject::new(format!("not a valid {}: {error}", M::NAME)))
}

/// The full name of the message inside an `Any`.
fn type_name(any: &Any) -> &str {
    any.type_url.rsplit('/').next().unwrap_or_default()
}

/// Something of a type that we do not have.
fn unknown_type(what: &str, name: &str, any: &Any) -> Reject {
    Reject::new(format!("skysail-proxy has no {what} {name:?} of type {}: take it out", type_name(any)))
}

/// The number in a wrapper.
fn number(wrapped: Option<UInt32Value>) -> Option<u32> {
    wrapped.map(|wrapped| wrapped.value)
}

/// The truth in a wrapper.
fn flag(wrapped: Option<BoolValue>) -> Option<bool> {
    wrapped.map(|wrapped| wrapped.value)
}

/// The longest duration there is, by the definition of `google.protobuf.Duration`: clocks can add it to now.
const MOST_SECONDS: u64 = 315_576_000_000;

/// A length of time; negative ones are refused.
fn duration(proto: &DurationProto) -> Result<Duration> {
    let (Ok(seconds), Ok(nanos)) = (u64::try_from(proto.seconds), u32::try_from(proto.nanos)) else {
        return Err(Reject::new("a duration must not be negative"));
    };
    Ok(Duration::new(seconds.min(MOST_SECONDS), nanos.min(999_999_999)))
}

/// A length of time of which zero means none, and a default where it is not given.
fn timeout(proto: Option<&DurationProto>, default: Option<Duration>) -> Result<Option<Duration>> {
    match proto {
        Some(proto) => Ok(Some(duration(proto)?).filter(|time| !time.is_zero())),
        None => Ok(default),
    }
}

#[cfg(test)]
mod tests;

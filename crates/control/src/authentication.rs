//! Authentication of callers: by the token of a service account, or by a certificate of this mesh.
//!
//! A call is judged by its connection and its headers, before anything of its body is read ([`Guarded`]). Rules:
//! - A token counts alone: one that is refused is not made up for by a certificate.
//! - A certificate is as good as the token it goes back to ([`Origin`]): it may be renewed without a token only for so long after
//!   that, in its own trust domain, and not after the pod's end.
//! - A pod that is known to be gone is refused, by what its credential says of it, else by the address of the call.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use skysail_core::{SpiffeId, connections::Admitted, logging::Throttle};
use skysail_identity::{BoundPod, Live, Origin, Peer, Verifier, not_after};
use skysail_xds::{
    certificates,
    grpc::{Answering, Call, Service, address},
    limits::Identity,
};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::{
    Extensions, Status,
    codegen::http::{HeaderMap, header::AUTHORIZATION},
    transport::server::{Connected, TcpConnectInfo, TlsConnectInfo},
};
use tracing::warn;

use crate::{
    audit::{Audit, Event, Text},
    metrics::{Metrics, count},
    platform::{Platform, PodOf},
};

/// Connection data of a call over TLS.
type TlsInfo = <TlsStream<TcpStream> as Connected>::ConnectInfo;

/// Clock; tests have their own.
pub(crate) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// How callers are judged.
pub(crate) struct Settings {
    /// Overrides the mesh configuration's trust domain.
    pub(crate) trust_domain: Option<String>,
    /// Time after a token within which a certificate may be renewed without another; zero for no limit.
    pub(crate) token_interval: Duration,
    pub(crate) clock: Clock,
}

/// Authenticates callers.
pub(crate) struct Authentication {
    tokens: Arc<Live<Verifier>>,
    settings: Settings,
    platform: Arc<Platform>,
    metrics: Arc<Metrics>,
    said: Throttle,
}

/// The caller of a call.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// Not authenticated: the call came to the plain port.
    Anyone,
    /// Authenticated.
    Proven(Arc<Proof>),
}

/// The identity that a caller has proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    pub(crate) id: SpiffeId,
    /// The pod its credential was given to, if that is known.
    pub(crate) pod: Option<BoundPod>,
    by: Credential,
}

/// Proof of a caller's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Credential {
    Token,
    Certificate { origin: Option<Origin>, not_after: SystemTime },
}

/// Limits of the certificate that a caller gets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) lifetime: Duration,
    pub(crate) origin: Option<Origin>,
}

#[cfg(test)]
impl Proof {
    /// That of a caller with a token.
    pub(crate) fn by_token(id: SpiffeId, pod: Option<&str>) -> Self {
        let pod = pod.map(|name| BoundPod { name: name.to_owned(), uid: String::new() });
        Self { id, pod, by: Credential::Token }
    }
}

impl Proof {
    /// What proved the identity: `token` or `certificate`.
    pub(crate) fn how(&self) -> &'static str {
        match self.by {
            Credential::Token => "token",
            Credential::Certificate { .. } => "certificate",
        }
    }
}

impl Authentication {
    pub(crate) fn new(
        tokens: Arc<Live<Verifier>>,
        settings: Settings,
        platform: Arc<Platform>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { tokens, settings, platform, metrics, said: Throttle::new(Duration::from_secs(1)) }
    }

    /// The trust domain of identities that tokens prove.
    pub(crate) fn trust_domain(&self) -> String {
        self.settings.trust_domain.clone().unwrap_or_else(|| self.platform.domains().own.clone())
    }

    /// Trust domains under which the same workloads were known before.
    pub(crate) fn aliases(&self) -> Vec<String> {
        self.platform.domains().aliases.clone()
    }

    /// Authenticates the caller of a call over TLS.
    fn identify(&self, info: &TlsInfo, headers: &HeaderMap) -> Result<Proof, Status> {
        let proof = match bearer(headers)? {
            Some(token) => self.by_token(token)?,
            None => self.by_certificate(info)?,
        };
        if proof.pod.is_none()
            && let Some(address) = info.get_ref().remote_addr()
            && let Some(pod) = self.platform.pod_at(address.ip())
        {
            self.check_present(&pod, "the call comes from the address of")?;
        }
        Ok(proof)
    }

    /// Refuses a pod that is known to be gone.
    fn check_present(&self, of: &PodOf, how: &str) -> Result<(), Status> {
        if !self.platform.is_gone(of) {
            return Ok(());
        }
        let PodOf { namespace, pod } = of;
        Err(Status::unauthenticated(format!("{how} pod {namespace}/{}, which is gone", pod.name)))
    }

    /// The proof of a caller whose credential was given to this pod.
    fn proof(&self, id: SpiffeId, pod: Option<BoundPod>, by: Credential) -> Result<Proof, Status> {
        if let Some(pod) = &pod {
            let of = PodOf { namespace: id.namespace.clone(), pod: pod.clone() };
            self.check_present(&of, "the credential was given to")?;
        }
        Ok(Proof { id, pod, by })
    }

    /// Returns the identity that a token was issued for.
    pub(crate) fn by_token(&self, token: &str) -> Result<Proof, Status> {
        let Some(verifier) = self.tokens.get() else {
            return Err(Status::unauthenticated(
                "tokens are not accepted here: neither --token-key nor --token-jwks was given",
            ));
        };
        let account = verifier.verify(token).map_err(|error| Status::unauthenticated(error.to_string()))?;
        let id = SpiffeId::new(self.trust_domain(), account.namespace, account.name);
        self.proof(id, account.pod, Credential::Token)
    }

    /// Returns the identity in a certificate, whose chain the handshake has verified.
    fn by_certificate(&self, info: &TlsInfo) -> Result<Proof, Status> {
        let chain = info.peer_certs();
        let leaf = chain.as_ref().and_then(|chain| chain.first()).ok_or_else(|| {
            Status::unauthenticated("neither a client certificate nor a bearer token was given")
        })?;
        let refused = |error: skysail_identity::Error| Status::unauthenticated(error.to_string());
        let not_after = not_after(leaf).map_err(refused)?;
        // The handshake was when the connection began, and that may have been before the certificate's end.
        if not_after <= (self.settings.clock)() {
            return Err(Status::unauthenticated(
                "the client certificate has ended since the connection began",
            ));
        }
        let peer = Peer::from_der(leaf).map_err(refused)?;
        let id = peer
            .spiffe
            .ok_or_else(|| Status::unauthenticated("the client certificate names no service account"))?;
        if id.trust_domain != self.trust_domain() && !self.aliases().contains(&id.trust_domain) {
            return Err(Status::unauthenticated(format!("{id} is of another trust domain")));
        }
        let origin = Origin::of(leaf).map_err(refused)?;
        let pod = origin.as_ref().and_then(|origin| origin.pod.clone());
        self.proof(id, pod, Credential::Certificate { origin, not_after })
    }

    /// Limits of the certificate for a caller that requests this lifetime.
    pub(crate) fn grant(&self, proof: &Proof, wish: Duration) -> Result<Grant, Status> {
        let now = (self.settings.clock)();
        let (origin, not_after) = match &proof.by {
            Credential::Token => {
                let origin = Origin { token_at: now, pod: proof.pod.clone() };
                return Ok(Grant { lifetime: wish, origin: Some(origin) });
            }
            Credential::Certificate { origin, not_after } => (origin.clone(), *not_after),
        };
        let interval = self.settings.token_interval;
        if interval.is_zero() || self.tokens.get().is_none() {
            return Ok(Grant { lifetime: wish, origin });
        }
        // A certificate that does not say when its token was is renewed with another key, but not for longer.
        let until = match &origin {
            Some(origin) => origin.token_at.min(now).checked_add(interval).unwrap_or(now),
            None => not_after,
        };
        match until.duration_since(now) {
            Ok(left) if left >= Duration::from_secs(1) => Ok(Grant { lifetime: wish.min(left), origin }),
            _ => Err(Status::unauthenticated(format!(
                "{} has shown no token for longer than --token-interval ({interval:?}); a certificate alone is not renewed any more",
                proof.id
            ))),
        }
    }

    /// The end of the access of a caller in this pod, by its own account, from this address: the end of the pod that its
    /// credential was given to, else of the one that has the address, else of the one it names.
    pub(crate) fn end(
        &self,
        proof: Option<&Proof>,
        address: Option<IpAddr>,
        declared: PodOf,
    ) -> impl Future<Output = Status> + Send + use<> {
        let bound = proof.and_then(|proof| proof.pod.clone());
        let of = bound
            .map(|pod| PodOf { namespace: declared.namespace.clone(), pod })
            .or_else(|| address.and_then(|ip| self.platform.pod_at(ip)))
            .unwrap_or(declared);
        let platform = Arc::clone(&self.platform);
        async move {
            let said = format!("pod {}/{} is gone", of.namespace, of.pod.name);
            platform.gone(of).await;
            Status::unauthenticated(said)
        }
    }

    /// Authenticates the caller of a call by its headers and its connection.
    fn caller(&self, headers: &HeaderMap, known: &Extensions) -> Result<Caller, Status> {
        let Some(info) = known.get::<TlsInfo>() else { return Ok(Caller::Anyone) };
        let proof = self.identify(info, headers).inspect_err(|refused| {
            count(&self.metrics.authentication_failures);
            if let Some(more) = self.said.admit(Instant::now()) {
                warn!(address = address(known), reason = refused.message(), more, "caller refused");
            }
        })?;
        Ok(Caller::Proven(Arc::new(proof)))
    }
}

/// Services whose calls are admitted after authentication.
pub(crate) struct Guarded<S> {
    pub(crate) services: S,
    pub(crate) authentication: Arc<Authentication>,
    pub(crate) audit: Arc<Audit>,
}

impl<S: Service> Service for Guarded<S> {
    fn has(&self, method: &str) -> bool {
        self.services.has(method)
    }

    fn admit(&self, method: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        let caller = self.authentication.caller(headers, known).inspect_err(|refused| {
            let from = address(known);
            let (address, reason) = (Text(&from), Text(refused.message()));
            self.audit.record(match method {
                certificates::METHOD => Event::CertificateRefused { address, reason, suppressed: 0 },
                _ => Event::DiscoveryRefused { address, proxy: Text(""), reason, suppressed: 0 },
            });
        })?;
        let connection = known.get::<Arc<Admitted>>();
        match &caller {
            Caller::Anyone => {
                if let Some(connection) = connection {
                    connection.prove();
                }
            }
            Caller::Proven(proof) => {
                let name = proof.id.to_string().into();
                if let Some(connection) = connection {
                    connection.prove_by(&name).map_err(|most| too_many(&name, most))?;
                }
                let instance = proof.pod.as_ref().map(|pod| format!("{}/{}", pod.name, pod.uid).into());
                known.insert(Identity { name, instance });
            }
        }
        known.insert(caller);
        Ok(())
    }

    fn answer(&self, call: Call) -> Answering {
        self.services.answer(call)
    }

    fn idle(&self, known: &Extensions) {
        if let Some(connection) = known.get::<Arc<Admitted>>() {
            connection.doubt();
        }
    }
}

/// The refusal of a call on one connection more than its identity may have.
fn too_many(identity: &str, most: usize) -> Status {
    Status::resource_exhausted(format!(
        "{identity} has {most} connections with calls in progress, the most that --max-connections-per-identity allows; \
         close some, or try again later"
    ))
}

/// The caller of an admitted call.
pub(crate) fn caller(extensions: &Extensions) -> Result<Caller, Status> {
    let caller = extensions.get::<Caller>().cloned();
    caller.ok_or_else(|| Status::internal("the call was not authenticated; please report it"))
}

/// The caller's address.
pub(crate) fn socket(extensions: &Extensions) -> Option<SocketAddr> {
    let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
    tls.or_else(|| extensions.get::<TcpConnectInfo>()).and_then(TcpConnectInfo::remote_addr)
}

/// Returns the bearer token of a call or request (RFC 6750, section 2.1).
///
/// # Errors
/// When there are several authorization fields, or something else than a bearer token in the field.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Status> {
    let mut fields = headers.get_all(AUTHORIZATION).iter();
    let Some(field) = fields.next() else { return Ok(None) };
    if fields.next().is_some() {
        return Err(Status::unauthenticated("there are several authorization fields; send one"));
    }
    let token = field.to_str().ok().and_then(|text| text.split_once(' '));
    match token {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty() => {
            Ok(Some(token.trim()))
        }
        _ => Err(Status::unauthenticated("the authorization field is not \"Bearer\" and a token")),
    }
}

#[cfg(test)]
mod tests;

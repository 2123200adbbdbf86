//! Authentication of callers: by a service account token or by a certificate of this mesh.
//!
//! [`AuthenticatedService`] authenticates a call by its connection and headers, before it reads the body. Rules:
//! - If a call has a token, only the token counts: a valid certificate does not replace a refused token.
//! - A certificate records the time and the pod of its last token ([`Origin`]). It can be renewed without a token only
//!   within `--token-interval` after that token, and in its own trust domain. The end of the pod ends renewals.
//! - If tokens are those of the watched cluster, its API server confirms each one ([`TokenReviews`]).
//! - A pod that is known to have ended is refused: the pod of the credential, else the pod at the address of the call.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use skysail_core::{SpiffeId, connections::Admitted, logging::Throttle};
use skysail_identity::{BoundPod, Live, Origin, Peer, Verifier, not_after};
use skysail_xds::{
    certificates,
    grpc::{Call, CallFuture, Service, address},
    limits::Identity,
};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::{
    Extensions, Request, Status,
    codegen::http::{HeaderMap, header::AUTHORIZATION},
    transport::server::{Connected, TcpConnectInfo, TlsConnectInfo},
};
use tracing::warn;

use crate::{
    audit::{AuditEvent, AuditLog, ExternalText},
    metrics::{Metrics, count},
    platform::{Platform, PodRef},
    token_reviews::TokenReviews,
};

/// Connection data of a call over TLS.
type TlsInfo = <TlsStream<TcpStream> as Connected>::ConnectInfo;

/// Clock; tests set the time.
pub(crate) type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// Settings of authentication.
pub(crate) struct AuthenticationSettings {
    /// Overrides the mesh configuration's trust domain.
    pub(crate) trust_domain: Option<String>,
    /// Time after a token within which a certificate can be renewed without another token; 0 disables the limit. Not
    /// used if no tokens are accepted.
    pub(crate) token_interval: Duration,
    pub(crate) clock: Clock,
}

/// Authenticates callers.
pub(crate) struct Authentication {
    tokens: Arc<Live<Verifier>>,
    /// Confirms tokens, if the control plane watches a cluster.
    reviews: Option<TokenReviews>,
    settings: AuthenticationSettings,
    platform: Arc<Platform>,
    metrics: Arc<Metrics>,
    refusal_lines: Throttle,
}

/// The caller of a call.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    /// A caller on the plain-text port.
    Unauthenticated,
    /// A caller with a verified credential.
    Authenticated(Arc<Principal>),
}

/// Principal of a caller: the identity that its credential proves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    pub(crate) id: SpiffeId,
    /// Pod for which the credential was issued, if the credential names one.
    pub(crate) pod: Option<BoundPod>,
    credential: Credential,
}

/// Credential of a caller.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Credential {
    Token,
    Certificate { origin: Option<Origin>, not_after: SystemTime },
}

/// Limits for the certificate of a caller.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) lifetime: Duration,
    /// Token to record in the certificate.
    pub(crate) origin: Option<Origin>,
}

#[cfg(test)]
impl Principal {
    /// Returns the principal of a caller with a token.
    pub(crate) fn with_token(id: SpiffeId, pod: Option<&str>) -> Self {
        let pod = pod.map(|name| BoundPod { name: name.to_owned(), uid: String::new() });
        Self { id, pod, credential: Credential::Token }
    }
}

impl Principal {
    /// Returns the kind of its credential: `token` or `certificate`.
    pub(crate) fn credential_name(&self) -> &'static str {
        match self.credential {
            Credential::Token => "token",
            Credential::Certificate { .. } => "certificate",
        }
    }
}

impl Authentication {
    pub(crate) fn new(
        tokens: Arc<Live<Verifier>>,
        settings: AuthenticationSettings,
        platform: Arc<Platform>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let refusal_lines = Throttle::new(Duration::from_secs(1));
        Self { tokens, reviews: None, settings, platform, metrics, refusal_lines }
    }

    /// Has tokens confirmed.
    pub(crate) fn with_reviews(self, reviews: Option<TokenReviews>) -> Self {
        Self { reviews, ..self }
    }

    /// Returns the trust domain of principals with a token.
    pub(crate) fn trust_domain(&self) -> String {
        self.settings.trust_domain.clone().unwrap_or_else(|| self.platform.trust_domains().own.clone())
    }

    /// Returns the former trust domains of the same workloads.
    pub(crate) fn aliases(&self) -> Vec<String> {
        self.platform.trust_domains().aliases.clone()
    }

    /// Authenticates the caller of a call over TLS.
    fn authenticate(&self, info: &TlsInfo, headers: &HeaderMap) -> Result<Principal, Status> {
        let principal = match bearer(headers)? {
            Some(token) => self.verify_token(token)?,
            None => self.verify_certificate(info)?,
        };
        if principal.pod.is_none()
            && let Some(address) = info.get_ref().remote_addr()
            && let Some(pod) = self.platform.pod_at(address.ip())
        {
            self.check_running(&pod, "the call comes from the address of")?;
        }
        Ok(principal)
    }

    /// Refuses a pod that is known to have ended. `relation` tells how the call refers to the pod.
    fn check_running(&self, of: &PodRef, relation: &str) -> Result<(), Status> {
        if !self.platform.has_ended(of) {
            return Ok(());
        }
        let PodRef { namespace, pod } = of;
        Err(Status::unauthenticated(format!(
            "{relation} pod {namespace}/{}, which no longer exists",
            pod.name
        )))
    }

    /// Returns the principal of a credential. Refuses it if its pod has ended.
    fn principal(
        &self,
        id: SpiffeId,
        pod: Option<BoundPod>,
        credential: Credential,
    ) -> Result<Principal, Status> {
        if let Some(pod) = &pod {
            let of = PodRef { namespace: id.namespace.clone(), pod: pod.clone() };
            self.check_running(&of, "the credential was issued for")?;
        }
        Ok(Principal { id, pod, credential })
    }

    /// Verifies a token and returns its principal.
    pub(crate) fn verify_token(&self, token: &str) -> Result<Principal, Status> {
        let Some(verifier) = self.tokens.get() else {
            return Err(Status::unauthenticated(
                "tokens are not accepted: the control plane has neither --token-key nor --token-jwks, and watches no cluster",
            ));
        };
        let account = verifier.verify(token).map_err(|error| Status::unauthenticated(error.to_string()))?;
        let id = SpiffeId::new(self.trust_domain(), account.namespace, account.name);
        self.principal(id, account.pod, Credential::Token)
    }

    /// Returns the principal of the client certificate, whose chain the TLS handshake has verified.
    fn verify_certificate(&self, info: &TlsInfo) -> Result<Principal, Status> {
        let chain = info.peer_certs();
        let leaf = chain.as_ref().and_then(|chain| chain.first()).ok_or_else(|| {
            Status::unauthenticated("the call has neither a client certificate nor a bearer token")
        })?;
        let refused = |error: skysail_identity::Error| Status::unauthenticated(error.to_string());
        let not_after = not_after(leaf).map_err(refused)?;
        // The certificate may have expired since the handshake.
        if not_after <= (self.settings.clock)() {
            return Err(Status::unauthenticated(
                "the client certificate has expired since the connection was opened; connect again with a new one",
            ));
        }
        let peer = Peer::from_der(leaf).map_err(refused)?;
        let id = peer.spiffe.ok_or_else(|| {
            Status::unauthenticated("the client certificate has no SPIFFE ID of a service account")
        })?;
        if id.trust_domain != self.trust_domain() && !self.aliases().contains(&id.trust_domain) {
            return Err(Status::unauthenticated(format!("{id} belongs to another trust domain")));
        }
        let origin = Origin::of(leaf).map_err(refused)?;
        let pod = origin.as_ref().and_then(|origin| origin.pod.clone());
        self.principal(id, pod, Credential::Certificate { origin, not_after })
    }

    /// Returns the limits for the certificate of a caller that requests this lifetime.
    pub(crate) fn grant(&self, principal: &Principal, requested: Duration) -> Result<Grant, Status> {
        let now = (self.settings.clock)();
        let (origin, not_after) = match &principal.credential {
            Credential::Token => {
                let origin = Origin { token_at: now, pod: principal.pod.clone() };
                return Ok(Grant { lifetime: requested, origin: Some(origin) });
            }
            Credential::Certificate { origin, not_after } => (origin.clone(), *not_after),
        };
        let interval = self.settings.token_interval;
        if interval.is_zero() || self.tokens.get().is_none() {
            return Ok(Grant { lifetime: requested, origin });
        }
        // A certificate without the time of its token can be renewed with another key, but not beyond its own expiry.
        let until = match &origin {
            Some(origin) => origin.token_at.min(now).checked_add(interval).unwrap_or(now),
            None => not_after,
        };
        match until.duration_since(now) {
            Ok(left) if left >= Duration::from_secs(1) => Ok(Grant { lifetime: requested.min(left), origin }),
            _ => Err(Status::unauthenticated(format!(
                "{} has presented no token within --token-interval ({interval:?}); renew the certificate with a token",
                principal.id
            ))),
        }
    }

    /// Returns a future that completes when the caller's pod ends, which ends its access. The pod is that of the
    /// credential, else the one at the address of the call, else the one that the caller declares.
    pub(crate) fn access_end(
        &self,
        principal: Option<&Principal>,
        address: Option<IpAddr>,
        declared: PodRef,
    ) -> impl Future<Output = Status> + Send + use<> {
        let bound = principal.and_then(|principal| principal.pod.clone());
        let of = bound
            .map(|pod| PodRef { namespace: declared.namespace.clone(), pod })
            .or_else(|| address.and_then(|ip| self.platform.pod_at(ip)))
            .unwrap_or(declared);
        let platform = Arc::clone(&self.platform);
        async move {
            let reason = format!("pod {}/{} no longer exists", of.namespace, of.pod.name);
            platform.wait_for_end(of).await;
            Status::unauthenticated(reason)
        }
    }

    /// Authenticates the caller of a call.
    fn caller(&self, headers: &HeaderMap, known: &Extensions) -> Result<Caller, Status> {
        let Some(info) = known.get::<TlsInfo>() else { return Ok(Caller::Unauthenticated) };
        let principal = self.authenticate(info, headers);
        let principal = principal.inspect_err(|refused| self.report_refusal(known, refused))?;
        Ok(Caller::Authenticated(Arc::new(principal)))
    }

    /// Returns the caller of an admitted call. The API server confirms its token, if it has one.
    ///
    /// # Errors
    /// The API server refuses the token.
    pub(crate) async fn confirmed<T>(&self, call: &Request<T>) -> Result<Caller, Status> {
        let caller = caller(call.extensions())?;
        if let Caller::Authenticated(principal) = &caller
            && let Some(token) = bearer(call.metadata().as_ref())?
        {
            let confirmed = self.confirm_token(token, &principal.id).await;
            confirmed.inspect_err(|refused| self.report_refusal(call.extensions(), refused))?;
        }
        Ok(caller)
    }

    /// Has the API server confirm a verified token, if it confirms tokens.
    ///
    /// # Errors
    /// The API server refuses the token.
    pub(crate) async fn confirm_token(&self, token: &str, id: &SpiffeId) -> Result<(), Status> {
        match &self.reviews {
            Some(reviews) => reviews.confirm(token, id).await,
            None => Ok(()),
        }
    }

    fn report_refusal(&self, known: &Extensions, refused: &Status) {
        count(&self.metrics.authentication_failures);
        if let Some(more) = self.refusal_lines.admit(Instant::now()) {
            warn!(address = address(known), reason = refused.message(), more, "caller refused");
        }
    }
}

/// Services that admit a call after authentication.
pub(crate) struct AuthenticatedService<S> {
    pub(crate) services: S,
    pub(crate) authentication: Arc<Authentication>,
    pub(crate) audit: Arc<AuditLog>,
}

impl<S: Service> Service for AuthenticatedService<S> {
    fn has(&self, method: &str) -> bool {
        self.services.has(method)
    }

    fn admit(&self, method: &str, headers: &HeaderMap, known: &mut Extensions) -> Result<(), Status> {
        let caller = self.authentication.caller(headers, known).inspect_err(|refused| {
            let from = address(known);
            let (address, reason) = (ExternalText(&from), ExternalText(refused.message()));
            self.audit.record(match method {
                certificates::METHOD => AuditEvent::CertificateRefused { address, reason, suppressed: 0 },
                _ => AuditEvent::DiscoveryRefused { address, proxy: ExternalText(""), reason, suppressed: 0 },
            });
        })?;
        let connection = known.get::<Arc<Admitted>>();
        match &caller {
            Caller::Unauthenticated => {
                if let Some(connection) = connection {
                    connection.mark_used();
                }
            }
            Caller::Authenticated(principal) => {
                let name = principal.id.to_string().into();
                if let Some(connection) = connection {
                    connection.mark_used_by(&name).map_err(|limit| too_many_connections(&name, limit))?;
                }
                let instance = principal.pod.as_ref().map(|pod| format!("{}/{}", pod.name, pod.uid).into());
                known.insert(Identity { name, instance });
            }
        }
        known.insert(caller);
        Ok(())
    }

    fn handle(&self, call: Call) -> CallFuture {
        self.services.handle(call)
    }

    fn idle(&self, known: &Extensions) {
        if let Some(connection) = known.get::<Arc<Admitted>>() {
            connection.mark_evictable();
        }
    }
}

/// Returns the refusal of a call that would exceed `--max-connections-per-identity`.
fn too_many_connections(identity: &str, limit: usize) -> Status {
    Status::resource_exhausted(format!(
        "{identity} has {limit} connections with calls in progress, the limit of --max-connections-per-identity; close some, \
         or retry later"
    ))
}

/// Returns the caller of an admitted call.
pub(crate) fn caller(extensions: &Extensions) -> Result<Caller, Status> {
    let caller = extensions.get::<Caller>().cloned();
    caller.ok_or_else(|| Status::internal("internal error: the call was not authenticated"))
}

/// Returns the caller's address.
pub(crate) fn peer_address(extensions: &Extensions) -> Option<SocketAddr> {
    let tls = extensions.get::<TlsConnectInfo<TcpConnectInfo>>().map(TlsConnectInfo::get_ref);
    tls.or_else(|| extensions.get::<TcpConnectInfo>()).and_then(TcpConnectInfo::remote_addr)
}

/// Returns the bearer token of a call or request (RFC 6750, section 2.1).
///
/// # Errors
/// When there are several authorization headers, or the header is not a bearer token.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Status> {
    let mut fields = headers.get_all(AUTHORIZATION).iter();
    let Some(field) = fields.next() else { return Ok(None) };
    if fields.next().is_some() {
        return Err(Status::unauthenticated("the call has several authorization headers; send one"));
    }
    let token = field.to_str().ok().and_then(|text| text.split_once(' '));
    match token {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty() => {
            Ok(Some(token.trim()))
        }
        _ => Err(Status::unauthenticated("the authorization header is not of the form \"Bearer TOKEN\"")),
    }
}

#[cfg(test)]
mod tests;

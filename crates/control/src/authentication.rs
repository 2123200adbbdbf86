//! Who calls: a workload with a certificate of ours, or with a service account's token.

use std::{sync::Arc, time::SystemTime};

use skysail_core::SpiffeId;
use skysail_identity::{Live, Peer, Verifier, not_after};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tonic::{Extensions, Status, metadata::MetadataMap, transport::server::Connected};

use crate::{
    metrics::{Metrics, count},
    platform::Platform,
};

/// What a call over TLS knows of its connection.
type TlsInfo = <TlsStream<TcpStream> as Connected>::ConnectInfo;

/// Establishes who calls.
pub(crate) struct Authentication {
    tokens: Arc<Live<Verifier>>,
    trust_domain: Option<String>,
    platform: Arc<Platform>,
    metrics: Arc<Metrics>,
}

/// Marks calls on the plain port.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Caller<'a> {
    /// Nobody asked who it is.
    Anyone,
    /// It must prove who it is.
    Proven(&'a TlsInfo),
}

impl Authentication {
    pub(crate) fn new(
        tokens: Arc<Live<Verifier>>,
        trust_domain: Option<String>,
        platform: Arc<Platform>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self { tokens, trust_domain, platform, metrics }
    }

    /// The trust domain identities are in.
    pub(crate) fn trust_domain(&self) -> String {
        self.trust_domain.clone().unwrap_or_else(|| self.platform.domains().own.clone())
    }

    /// Trust domains under which the same workloads were known before.
    pub(crate) fn aliases(&self) -> Vec<String> {
        self.platform.domains().aliases.clone()
    }

    /// Whom a TLS caller proves to be. A token counts before a certificate, since it is what the platform says
    /// of the workload now.
    pub(crate) fn identity(&self, info: &TlsInfo, metadata: &MetadataMap) -> Result<SpiffeId, Status> {
        self.proven(info, metadata).map(|(id, _)| id)
    }

    /// The same, and what proves it: `token` or `certificate`.
    pub(crate) fn proven(
        &self,
        info: &TlsInfo,
        metadata: &MetadataMap,
    ) -> Result<(SpiffeId, &'static str), Status> {
        let by_certificate = |id: SpiffeId| (id, "certificate");
        let identity = match bearer(metadata) {
            Some(token) => match self.by_token(token) {
                // A workload that runs longer than its token still has its certificate.
                Err(refused) => self.by_certificate(info).ok().flatten().map(by_certificate).ok_or(refused),
                proven => proven.map(|id| (id, "token")),
            },
            None => self.by_certificate(info)?.map(by_certificate).ok_or_else(|| {
                Status::unauthenticated("neither a client certificate nor a bearer token was given")
            }),
        };
        identity.inspect_err(|_| count(&self.metrics.authentication_failures))
    }

    /// The identity of the service account that a token was issued for.
    pub(crate) fn by_token(&self, token: &str) -> Result<SpiffeId, Status> {
        let Some(verifier) = self.tokens.get() else {
            return Err(Status::unauthenticated(
                "tokens are not accepted here: neither --token-key nor --token-jwks was given",
            ));
        };
        let account = verifier.verify(token).map_err(|error| Status::unauthenticated(error.to_string()))?;
        if let Some(pod) = account.pod.as_ref().filter(|pod| self.platform.is_gone(&account.namespace, pod)) {
            let said = format!("the token was given to pod {}/{pod}, which is gone", account.namespace);
            return Err(Status::unauthenticated(said));
        }
        Ok(SpiffeId::new(self.trust_domain(), account.namespace, account.name))
    }

    /// The certificate's chain was verified in the handshake.
    fn by_certificate(&self, info: &TlsInfo) -> Result<Option<SpiffeId>, Status> {
        let Some(chain) = info.peer_certs() else { return Ok(None) };
        let Some(leaf) = chain.first() else { return Ok(None) };
        let refused = |error: skysail_identity::Error| Status::unauthenticated(error.to_string());
        // That was when the connection began, and it may have lasted for longer than the certificate.
        if not_after(leaf).map_err(refused)? <= SystemTime::now() {
            return Err(Status::unauthenticated(
                "the client certificate has ended since the connection began",
            ));
        }
        let peer = Peer::from_der(leaf).map_err(refused)?;
        let id = peer
            .spiffe
            .ok_or_else(|| Status::unauthenticated("the client certificate names no service account"))?;
        let own = self.trust_domain();
        if id.trust_domain != own && !self.platform.domains().aliases.contains(&id.trust_domain) {
            return Err(Status::unauthenticated(format!("{id} is of another trust domain")));
        }
        Ok(Some(SpiffeId { trust_domain: own, ..id }))
    }
}

/// How the call's connection is protected.
pub(crate) fn caller(extensions: &Extensions) -> Caller<'_> {
    extensions.get::<TlsInfo>().map_or(Caller::Anyone, Caller::Proven)
}

fn bearer(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ").map(str::trim)
}

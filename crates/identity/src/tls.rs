//! rustls configurations from one description that fits both Envoy's TLS contexts and the mesh's own use.
//!
//! A configuration is made once and stays good while keys and roots change underneath: it holds [`Live`]
//! handles and looks at them in each handshake. Session resumption is off in it, because a resumed session skips the
//! check of the peer's certificate and would outlive a change of trust; [`crate::resumption`] has it under control.

use std::{
    sync::{Arc, LazyLock},
    time::{SystemTime, UNIX_EPOCH},
};

use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error as TlsError,
    OtherError, ServerConfig, SignatureScheme, SupportedProtocolVersion,
    client::{
        ResolvesClientCert, Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};

use crate::{
    Error,
    identity::{Identity, Live, Roots, not_after},
    matcher::NameMatch,
    peer::Peer,
};

/// What TLS is to be like, on either side.
#[derive(Clone, Debug, Default)]
pub struct TlsSpec {
    /// Our certificates. A server takes the first whose key the client can verify; a client sends the first,
    /// when asked. May be empty for a client.
    pub identities: Vec<Arc<Live<Identity>>>,
    /// Which peers are accepted. `None`: a server asks for no certificate, a client accepts any.
    pub peer: Option<PeerCheck>,
    /// Protocols for ALPN, in order of preference; empty: no ALPN.
    pub alpn: Vec<Vec<u8>>,
    /// The oldest version spoken.
    pub min_version: Version,
    /// The newest version spoken; `None`: the newest there is.
    pub max_version: Option<Version>,
}

/// A version of TLS. Older ones are not spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// TLS 1.2
    #[default]
    Tls12,
    /// TLS 1.3
    Tls13,
}

/// Which peers are accepted.
#[derive(Clone, Debug)]
pub struct PeerCheck {
    /// Who must have signed the peer's certificate.
    pub roots: Arc<Live<Roots>>,
    /// Names of which the certificate must have one; empty: any name.
    pub names: Vec<NameMatch>,
    /// Client only: the certificate must also be for the host name asked for, as on the web.
    pub host_name: bool,
    /// Server only: refuse clients that send no certificate.
    pub required: bool,
}

impl PeerCheck {
    /// A check of SPIFFE ids: signed by `roots`, with one of `names`, on a server required.
    pub fn spiffe(roots: Arc<Live<Roots>>, names: Vec<NameMatch>) -> Self {
        Self { roots, names, host_name: false, required: true }
    }

    /// Checks a peer again that was accepted before: by the roots of now, at a time when its certificate was valid.
    ///
    /// # Errors
    /// The roots of now do not accept it.
    pub(crate) fn recheck(
        &self,
        chain: &[CertificateDer<'_>],
        name: Option<&ServerName<'_>>,
    ) -> Result<(), Error> {
        let Some((leaf, issuers)) = chain.split_first() else { return Ok(()) };
        let then = SystemTime::now().min(not_after(leaf)?);
        let then = UnixTime::since_unix_epoch(then.duration_since(UNIX_EPOCH).unwrap_or_default());
        let check = CheckPeer { check: self.clone(), provider: provider() };
        match name {
            Some(name) => check.verify_server_cert(leaf, issuers, name, &[], then).map(drop),
            None => check.verify_client_cert(leaf, issuers, then).map(drop),
        }
        .map_err(|error| Error::Tls(error.to_string()))
    }

    /// Applies the names to a certificate whose chain is good.
    fn check_names(&self, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
        if self.names.is_empty() {
            return Ok(());
        }
        let peer = Peer::from_der(certificate)
            .map_err(|error| CertificateError::Other(OtherError(Arc::new(error))))?;
        if self.names.iter().any(|name| name.matches(&peer)) {
            return Ok(());
        }
        let wanted = self.names.iter().map(ToString::to_string).collect();
        let presented = peer.uris.into_iter().chain(peer.dns).collect();
        Err(CertificateError::Other(OtherError(Arc::new(WrongName { presented, wanted }))).into())
    }
}

/// A peer whose certificate is genuine but names somebody else.
#[derive(Debug, thiserror::Error)]
#[error("the peer is {presented:?}, accepted are {wanted:?}")]
pub struct WrongName {
    /// The names in its certificate.
    pub presented: Vec<String>,
    /// The names that would have been accepted.
    pub wanted: Vec<String>,
}

impl TlsSpec {
    /// The configuration for accepting connections.
    ///
    /// # Errors
    /// Without a certificate, or with a version range that is empty.
    pub fn server(&self) -> Result<Arc<ServerConfig>, Error> {
        if self.identities.is_empty() {
            return Err(Error::Tls("a server needs a certificate".into()));
        }
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&self.versions()?)
            .map_err(|error| Error::Tls(error.to_string()))?;
        let builder = match &self.peer {
            Some(check) => {
                builder.with_client_cert_verifier(Arc::new(CheckPeer { check: check.clone(), provider }))
            }
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::new(OurCertificates(self.identities.clone())));
        config.alpn_protocols.clone_from(&self.alpn);
        config.session_storage = Arc::new(NoServerSessionStorage {});
        // Clients often list AES-256 first.
        config.ignore_client_order = true;
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The configuration for making connections.
    ///
    /// # Errors
    /// With a version range that is empty.
    pub fn client(&self) -> Result<Arc<ClientConfig>, Error> {
        let provider = provider();
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&self.versions()?)
            .map_err(|error| Error::Tls(error.to_string()))?
            .dangerous();
        let builder = match &self.peer {
            Some(check) => builder
                .with_custom_certificate_verifier(Arc::new(CheckPeer { check: check.clone(), provider })),
            None => builder.with_custom_certificate_verifier(Arc::new(AnyPeer { provider })),
        };
        let mut config =
            builder.with_client_cert_resolver(Arc::new(OurCertificates(self.identities.clone())));
        config.alpn_protocols.clone_from(&self.alpn);
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }

    fn versions(&self) -> Result<Vec<&'static SupportedProtocolVersion>, Error> {
        let newest = self.max_version.unwrap_or(Version::Tls13);
        let range = self.min_version..=newest;
        if range.is_empty() {
            return Err(Error::Tls("the oldest version allowed is newer than the newest".into()));
        }
        let all = [(Version::Tls13, &TLS13), (Version::Tls12, &TLS12)];
        Ok(all
            .into_iter()
            .filter(|(version, _)| range.contains(version))
            .map(|(_, version)| version)
            .collect())
    }
}

/// The cryptography of all configurations, made once. AES-128 and SHA-256 come first: they cost least, and nothing in a
/// handshake with X25519 or P-256 is stronger.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = aws_lc_rs::default_provider();
        provider.cipher_suites.sort_by_key(|suite| {
            !matches!(
                suite.suite(),
                CipherSuite::TLS13_AES_128_GCM_SHA256
                    | CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
                    | CipherSuite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256
            )
        });
        Arc::new(provider)
    });
    Arc::clone(&PROVIDER)
}

/// Our certificates of now.
#[derive(Debug)]
struct OurCertificates(Vec<Arc<Live<Identity>>>);

impl OurCertificates {
    fn choose(&self, schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let usable = |identity: &Arc<Identity>| identity.certified.key.choose_scheme(schemes).is_some();
        let identity = self.0.iter().filter_map(|live| live.get()).find(usable)?;
        Some(Arc::clone(&identity.certified))
    }
}

impl ResolvesServerCert for OurCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.choose(hello.signature_schemes())
    }
}

impl ResolvesClientCert for OurCertificates {
    fn resolve(&self, _hints: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.choose(schemes)
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}

/// How every verifier checks that the peer holds the key of its certificate: with its `provider`.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, TlsError> {
            verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

/// Checks the peer's certificate by chain and names, on either side.
#[derive(Debug)]
struct CheckPeer {
    check: PeerCheck,
    provider: Arc<CryptoProvider>,
}

impl CheckPeer {
    fn roots(&self) -> Result<Arc<Roots>, TlsError> {
        self.check
            .roots
            .get()
            .ok_or_else(|| TlsError::General("no trusted certificates are known yet".into()))
    }
}

impl ServerCertVerifier for CheckPeer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let roots = self.roots()?;
        if self.check.host_name {
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots.store), Arc::clone(&self.provider))
                .build()
                .map_err(|error| TlsError::General(error.to_string()))?
                .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        } else {
            let parsed = ParsedCertificate::try_from(end_entity)?;
            let algorithms = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&parsed, &roots.store, intermediates, now, algorithms)?;
        }
        self.check.check_names(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for CheckPeer {
    fn client_auth_mandatory(&self) -> bool {
        self.check.required
    }

    /// None: they would cost bytes in each handshake, and clients of a mesh have one certificate anyway.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        let verified = self.roots()?.clients.verify_client_cert(end_entity, intermediates, now)?;
        self.check.check_names(end_entity)?;
        Ok(verified)
    }

    signatures!();
}

/// Accepts any server that holds the key of the certificate it sends: TLS origination without a CA given.
#[derive(Debug)]
struct AnyPeer {
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for AnyPeer {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

#[cfg(test)]
mod tests;

//! rustls configurations from one description, which covers Envoy's TLS contexts and the mesh's own use.
//!
//! A configuration is built once and stays valid while keys and roots change: it holds [`Live`] handles and reads them
//! in each handshake. Session resumption is disabled in it: a resumed session skips the verification of the peer's
//! certificate, and would outlive a change of trust. [`crate::resumption`] handles both.

use std::{sync::Arc, time::Duration};

use rustls::{
    CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error as TlsError, NamedGroup,
    ServerConfig, SignatureScheme, SupportedCipherSuite, SupportedProtocolVersion,
    client::{
        ResolvesClientCert, Resumption,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, NoServerSessionStorage, ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    version::{TLS12, TLS13},
};

use crate::{
    Error,
    check::{PeerCheck, Role, check_host_name},
    identity::{Identity, Live},
    matcher,
    provider::provider,
};

/// TLS settings of either side.
#[derive(Clone, Debug, Default)]
pub struct TlsSpec {
    /// Own certificates. Those whose keys the peer cannot verify are skipped. A server uses one for the requested
    /// host name, else the first; a client sends the first if the server requests one. May be empty for a client.
    pub identities: Vec<Arc<Live<Identity>>>,
    /// Verification of peers. With `None`, a server requests no certificate, and a client accepts any.
    pub peer: Option<PeerCheck>,
    /// ALPN protocols in order of preference; empty disables ALPN.
    pub alpn: Vec<Vec<u8>>,
    /// Minimum version.
    pub min_version: Version,
    /// Maximum version; `None` is the newest supported.
    pub max_version: Option<Version>,
    /// TLS 1.2 cipher suites in order of preference; empty enables all, the cheapest first. TLS 1.3 suites are
    /// always enabled.
    pub suites: Vec<CipherSuite>,
    /// Key exchange groups in order of preference; empty selects the defaults.
    pub groups: Vec<NamedGroup>,
    /// Server only: uses the client's order of cipher suites.
    pub client_order: bool,
    /// Session resumption.
    pub sessions: SessionResumption,
}

/// Settings of session resumption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionResumption {
    /// Maximum age of a session in whole seconds; 0 disables resumption.
    pub lifetime: Duration,
    /// Client only: maximum number of sessions kept; 0 disables resumption.
    pub kept: usize,
}

impl Default for SessionResumption {
    /// One hour; 64 sessions of 2 to 3 kB each.
    fn default() -> Self {
        Self { lifetime: Duration::from_hours(1), kept: 64 }
    }
}

/// TLS version; older ones are not supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    /// TLS 1.2
    #[default]
    Tls12,
    /// TLS 1.3
    Tls13,
}

impl TlsSpec {
    /// Returns the server configuration.
    ///
    /// # Errors
    /// There is no certificate, the version range is empty or without a cipher suite, or a group is not supported.
    pub fn server(&self) -> Result<Arc<ServerConfig>, Error> {
        if self.identities.is_empty() {
            return Err(Error::Tls("a server needs a certificate".into()));
        }
        let provider = self.provider()?;
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
        // Clients often prefer AES-256, which is slower.
        config.ignore_client_order = !self.client_order;
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// Returns the client configuration.
    ///
    /// # Errors
    /// The version range is empty or without a cipher suite, or a group is not supported.
    pub fn client(&self) -> Result<Arc<ClientConfig>, Error> {
        let provider = self.provider()?;
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

    /// Returns the cryptography provider of this configuration.
    fn provider(&self) -> Result<Arc<CryptoProvider>, Error> {
        let mut provider = provider();
        if self.suites.is_empty() && self.groups.is_empty() {
            return Ok(provider);
        }
        let narrowed = Arc::make_mut(&mut provider);
        if !self.suites.is_empty() {
            let rank = |suite: &SupportedCipherSuite| match suite.tls13() {
                Some(_) => Some(0),
                None => self.suites.iter().position(|wanted| *wanted == suite.suite()).map(|place| place + 1),
            };
            narrowed.cipher_suites.retain(|suite| rank(suite).is_some());
            narrowed.cipher_suites.sort_by_key(rank);
        }
        if !self.groups.is_empty() {
            let known = |wanted: &NamedGroup| {
                aws_lc_rs::ALL_KX_GROUPS.iter().copied().find(|group| group.name() == *wanted)
            };
            let groups: Option<Vec<_>> = self.groups.iter().map(known).collect();
            narrowed.kx_groups = groups.ok_or_else(|| {
                Error::Tls(format!("not all of the groups {:?} are supported", self.groups))
            })?;
        }
        Ok(provider)
    }

    fn versions(&self) -> Result<Vec<&'static SupportedProtocolVersion>, Error> {
        let newest = self.max_version.unwrap_or(Version::Tls13);
        let range = self.min_version..=newest;
        if range.is_empty() {
            return Err(Error::Tls("the minimum version is newer than the maximum version".into()));
        }
        let all = [(Version::Tls13, &TLS13), (Version::Tls12, &TLS12)];
        Ok(all
            .into_iter()
            .filter(|(version, _)| range.contains(version))
            .map(|(_, version)| version)
            .collect())
    }
}

/// Current own certificates.
#[derive(Debug)]
struct OurCertificates(Vec<Arc<Live<Identity>>>);

impl OurCertificates {
    /// Chooses a certificate whose key the peer can verify: one for the requested name, else the first.
    fn choose(&self, schemes: &[SignatureScheme], name: Option<&str>) -> Option<Arc<CertifiedKey>> {
        let usable = |identity: &Arc<Identity>| identity.certified.key.choose_scheme(schemes).is_some();
        let mut usable = self.0.iter().filter_map(|live| live.get()).filter(usable);
        let first = usable.next()?;
        let is_for = |identity: &Arc<Identity>, name| {
            identity.peer.dns.iter().any(|own| matcher::is_dns_name(own, name))
        };
        let chosen = match name {
            Some(name) if self.0.len() > 1 && !is_for(&first, name) => {
                usable.find(|identity| is_for(identity, name)).unwrap_or(first)
            }
            _ => first,
        };
        Some(Arc::clone(&chosen.certified))
    }
}

impl ResolvesServerCert for OurCertificates {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.choose(hello.signature_schemes(), hello.server_name())
    }
}

impl ResolvesClientCert for OurCertificates {
    fn resolve(&self, _hints: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.choose(schemes, None)
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}

/// Methods that verify signatures with the verifier's `provider`; they are the same in every verifier.
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

/// Verifies the chain and the names of the peer's certificate, on either side.
#[derive(Debug)]
struct CheckPeer {
    check: PeerCheck,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for CheckPeer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let leaf = self.check.check(end_entity, intermediates, Role::Server, now, &self.provider)?;
        if self.check.host_name {
            check_host_name(&leaf, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for CheckPeer {
    fn client_auth_mandatory(&self) -> bool {
        self.check.is_mandatory()
    }

    /// Empty: hints would cost bytes in each handshake, and clients of a mesh have only one certificate.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        if !self.check.accepts_untrusted {
            self.check.check(end_entity, intermediates, Role::Client, now, &self.provider)?;
        }
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}

/// Accepts any server that holds the key of its certificate: TLS origination without a CA.
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

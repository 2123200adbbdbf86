//! Verification of peers by the chain, the names and the key of their certificate.

use std::{fmt, sync::Arc, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rustls::{
    Error as TlsError,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::certificate::X509Certificate;

use crate::{
    Error,
    identity::{Live, not_after},
    matcher::{NameMatch, SanKind},
    peer::Peer,
    provider,
    roots::{ChainRules, Crls, Roots, other, refused, unix},
};

/// Rules for accepting peers. Source: `envoy.extensions.transport_sockets.tls.v3.CertificateValidationContext`.
#[derive(Clone, Debug)]
pub struct PeerCheck {
    /// Roots to which the peer's chain must lead.
    pub roots: Arc<Live<Roots>>,
    /// Revocation lists in addition to those of the roots.
    pub crls: Option<Arc<Live<Crls>>>,
    /// Requires a revocation list only for the peer's own certificate, not for the certificates above it.
    pub only_leaf_crl: bool,
    /// Maximum number of certificates above the peer's own, including the root.
    pub max_depth: Option<u32>,
    /// Accepted names; the certificate must have one of them. Empty accepts any name.
    pub names: Vec<NameMatch>,
    /// Accepted fingerprints; the certificate must have one of them. Empty accepts any.
    pub pins: Vec<Pin>,
    /// The fingerprint alone decides: neither the chain nor the period of validity is verified. Empty `pins` then accept
    /// no certificate.
    pub only_pins: bool,
    /// Client only: the certificate must also match the requested host name, as on the web.
    pub host_name: bool,
    /// Server only: refuses clients without a certificate.
    pub required: bool,
    /// Server only: accepts a client whose certificate is not valid. It counts as a client without a certificate
    /// ([`Acceptor::identifies`](crate::Acceptor::identifies)).
    pub accepts_untrusted: bool,
}

/// Role of the peer whose certificate is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The peer is a client.
    Client,
    /// The peer is a server.
    Server,
}

impl PeerCheck {
    /// Accepts every certificate that chains to `roots`; a server does not require one.
    pub fn new(roots: Arc<Live<Roots>>) -> Self {
        Self {
            roots,
            crls: None,
            only_leaf_crl: false,
            max_depth: None,
            names: Vec::new(),
            pins: Vec::new(),
            only_pins: false,
            host_name: false,
            required: false,
            accepts_untrusted: false,
        }
    }

    /// Requires a certificate that chains to `roots` and has one of `names`; a server refuses clients without
    /// one.
    pub fn spiffe(roots: Arc<Live<Roots>>, names: Vec<NameMatch>) -> Self {
        Self { names, required: true, ..Self::new(roots) }
    }

    /// Returns whether all data that the check needs is present.
    pub fn is_ready(&self) -> bool {
        self.roots.get().is_some() && self.crls.as_ref().is_none_or(|crls| crls.get().is_some())
    }

    /// Returns whether a server refuses clients without a certificate. As in Envoy's SPIFFE validator, this
    /// includes roots that are bound to trust domains.
    pub fn is_mandatory(&self) -> bool {
        self.required || self.roots.get().is_some_and(|roots| roots.are_of_domains())
    }

    /// Verifies a chain, the peer's own certificate first, like a handshake at time `now`. Does not check the host
    /// name.
    ///
    /// # Errors
    /// The peer is not accepted, or trusted roots are missing.
    pub fn verify(&self, chain: &[CertificateDer<'_>], role: Role, now: SystemTime) -> Result<(), TlsError> {
        let Some((leaf, intermediates)) = chain.split_first() else {
            return Err(TlsError::NoCertificatesPresented);
        };
        self.check(leaf, intermediates, role, unix(now), &provider::provider()).map(drop)
    }

    /// Verifies an accepted peer again with the current roots and revocation lists. If its own certificate has
    /// expired, that is not an error. `server` is the requested host name; `None` if the peer is a client.
    ///
    /// # Errors
    /// The peer is no longer accepted.
    pub(crate) fn recheck(
        &self,
        chain: &[CertificateDer<'_>],
        server: Option<&ServerName<'_>>,
    ) -> Result<(), Error> {
        let Some((leaf, intermediates)) = chain.split_first() else { return Ok(()) };
        let then = unix(SystemTime::now().min(not_after(leaf)?));
        let role = if server.is_some() { Role::Server } else { Role::Client };
        let checked = self.check(leaf, intermediates, role, then, &provider::provider());
        let named = checked.and_then(|leaf| match server {
            Some(name) if self.host_name => check_host_name(&leaf, name),
            _ => Ok(()),
        });
        named.map_err(|error| Error::Tls(error.to_string()))
    }

    /// Verifies a chain for rustls. Returns the parsed certificate for the check of a server's host name.
    pub(crate) fn check<'a>(
        &self,
        leaf: &'a CertificateDer<'a>,
        intermediates: &[CertificateDer<'_>],
        role: Role,
        now: UnixTime,
        provider: &CryptoProvider,
    ) -> Result<EndEntityCert<'a>, TlsError> {
        let unknown = || TlsError::General("no trusted certificates are available yet".into());
        let roots = self.roots.get().ok_or_else(unknown)?;
        let crls = self.crls.as_ref().map(|crls| crls.get().ok_or_else(unknown)).transpose()?;
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf)
            .map_err(|error| other(Error::Certificate(format!("it cannot be parsed: {error}"))))?;
        let verified = EndEntityCert::try_from(leaf).map_err(refused)?;
        let rules = ChainRules {
            algorithms: provider.signature_verification_algorithms.all,
            crls: crls.as_deref(),
            only_leaf_crl: self.only_leaf_crl,
            max_depth: self.max_depth,
            usage: match role {
                Role::Client => KeyUsage::client_auth(),
                Role::Server => KeyUsage::server_auth(),
            },
            now,
        };
        if !self.only_pins {
            rules.verify(&verified, intermediates, roots.store_for(&parsed)?)?;
        }
        check_key_usage(&parsed)?;
        self.check_pins(leaf, &parsed)?;
        self.check_names(|| Peer::of(&parsed), roots.are_of_domains())?;
        Ok(verified)
    }

    /// Verifies the names of a peer whose certificate is not at hand. For explanations.
    ///
    /// # Errors
    /// The peer has none of the accepted names.
    pub fn verify_names(&self, peer: &Peer) -> Result<(), TlsError> {
        let only_uris = self.roots.get().is_some_and(|roots| roots.are_of_domains());
        self.check_names(|| peer.clone(), only_uris)
    }

    /// Requires one of the accepted names. As in Envoy, only URIs count if the roots are bound to trust
    /// domains.
    fn check_names(&self, peer: impl FnOnce() -> Peer, only_uris: bool) -> Result<(), TlsError> {
        if self.names.is_empty() {
            return Ok(());
        }
        let mut peer = peer();
        if only_uris {
            peer = Peer { uris: peer.uris, ..Peer::default() };
        }
        let counts = |name: &&NameMatch| !only_uris || matches!(name.kind, SanKind::Any | SanKind::Uri);
        if self.names.iter().filter(counts).any(|name| name.matches(&peer)) {
            return Ok(());
        }
        let wanted: Vec<_> = self.names.iter().map(ToString::to_string).collect();
        let presented: Vec<_> = peer.uris.into_iter().chain(peer.dns).collect();
        Err(other(format_args!("the peer is {presented:?}, accepted are {wanted:?}")))
    }

    fn check_pins(&self, leaf: &CertificateDer<'_>, parsed: &X509Certificate<'_>) -> Result<(), TlsError> {
        let matches = |pin: &Pin| match pin {
            Pin::Certificate(hash) => sha256(leaf) == Some(*hash),
            Pin::Key(hash) => sha256(parsed.public_key().raw) == Some(*hash),
        };
        if (self.pins.is_empty() && !self.only_pins) || self.pins.iter().any(matches) {
            Ok(())
        } else {
            Err(other("neither the peer's certificate nor its key has one of the configured fingerprints"))
        }
    }
}

/// Checks that the key may sign, as every supported key exchange requires (RFC 8446, section 4.4.2.2).
fn check_key_usage(certificate: &X509Certificate<'_>) -> Result<(), TlsError> {
    match certificate.key_usage() {
        Ok(None) => Ok(()),
        Ok(Some(usage)) if usage.value.digital_signature() => Ok(()),
        _ => Err(other("the keyUsage of the peer's certificate does not allow digital signatures")),
    }
}

/// SHA-256 fingerprint of a certificate or of its key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pin {
    /// Of the DER certificate. Source: `verify_certificate_hash`.
    Certificate([u8; 32]),
    /// Of the DER SubjectPublicKeyInfo. Source: `verify_certificate_spki`.
    Key([u8; 32]),
}

impl Pin {
    /// Parses a certificate fingerprint: 64 hexadecimal digits, with or without colons between bytes.
    pub fn certificate(hex: &str) -> Option<Self> {
        let digits: Vec<u8> = match hex.len() {
            64 => hex.bytes().collect(),
            95 if hex.bytes().skip(2).step_by(3).all(|byte| byte == b':') => {
                hex.bytes().enumerate().filter(|(index, _)| index % 3 != 2).map(|(_, byte)| byte).collect()
            }
            _ => return None,
        };
        let value = |digit: u8| char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok());
        let mut hash = [0; 32];
        for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0])? << 4 | value(pair[1])?;
        }
        Some(Self::Certificate(hash))
    }

    /// Parses a key fingerprint: base64.
    pub fn key(base64: &str) -> Option<Self> {
        STANDARD.decode(base64).ok()?.try_into().ok().map(Self::Key)
    }
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, hash) = match self {
            Self::Certificate(hash) => ("certificate", hash),
            Self::Key(hash) => ("key", hash),
        };
        write!(f, "{kind}:")?;
        hash.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Returns the SHA-256 hash, computed by the library that TLS uses.
fn sha256(bytes: &[u8]) -> Option<[u8; 32]> {
    let suite = aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256.tls13()?;
    suite.common.hash_provider.hash(bytes).as_ref().try_into().ok()
}

/// Checks that a certificate matches a host name, as on the web (RFC 6125).
pub(crate) fn check_host_name(leaf: &EndEntityCert<'_>, name: &ServerName<'_>) -> Result<(), TlsError> {
    leaf.verify_is_valid_for_subject_name(name).map_err(refused)
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

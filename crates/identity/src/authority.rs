//! Certificate authority of the mesh: signs workload certificates for identities that the caller has verified.
//!
//! An authority has a signing key, the certificates from it up to a root, and the trust bundle, which may
//! contain several roots ([`crate::rotation`]). [`crate::cacerts`] loads a plugged-in authority;
//! [`crate::rotation`] makes a self-signed one.

use std::{
    net::IpAddr,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use skysail_core::SpiffeId;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::{
    Error,
    cacerts::{self, RootInfo},
    check::{PeerCheck, Role},
    csr::Csr,
    identity::{Identity, Live},
    origin::Origin,
    roots::Roots,
};

/// Time by which certificates are backdated, for peers whose clocks are slow. [`margin`] limits it to a tenth of
/// the lifetime.
pub(crate) const CLOCK_SKEW: Duration = Duration::from_secs(120);
const ONE_MINUTE: Duration = Duration::from_secs(60);

/// Signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Certificates between a leaf and the root, one PEM text each.
    intermediates: Vec<String>,
    /// All roots as one PEM text.
    roots_pem: String,
    roots: Vec<RootInfo>,
    not_before: SystemTime,
    not_after: SystemTime,
}

impl std::fmt::Debug for Authority {
    /// Omits the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

/// A signed certificate.
#[derive(Clone, Debug)]
pub struct Signed {
    /// PEM texts in the form of Istio's certificate service: the leaf, the intermediates, and all roots in one
    /// text at the end.
    pub chain: Vec<String>,
    /// Serial number of the leaf, hexadecimal.
    pub serial: String,
    /// SHA-256 of the leaf's SubjectPublicKeyInfo, hexadecimal.
    pub key_sha256: String,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
}

impl Signed {
    /// Returns the chain as one PEM text.
    pub fn pem(&self) -> String {
        self.chain.concat()
    }
}

impl Authority {
    /// Returns a new self-signed authority that is not stored.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn ephemeral() -> Result<Self, Error> {
        let root = Root::generate(Duration::from_secs(365 * 24 * 3600), SystemTime::now())?;
        Self::of_root(&root, &[])
    }

    /// Returns an authority whose root signs; `others` (PEM) are trusted too.
    ///
    /// # Errors
    /// One of the certificates is invalid.
    pub fn of_root(root: &Root, others: &[&str]) -> Result<Self, Error> {
        let roots = std::iter::once(&*root.certificate).chain(others.iter().copied()).collect::<String>();
        Self::from_pem(&roots, &root.certificate, &root.key, "")
    }

    /// Returns an authority from the contents of Istio's files: `root-cert.pem`, `ca-cert.pem`, `ca-key.pem`
    /// and `cert-chain.pem` (which may be empty).
    ///
    /// # Errors
    /// A file is invalid, or the files do not belong together. The error names the file.
    pub fn from_pem(roots: &str, certificate: &str, key: &str, chain: &str) -> Result<Self, Error> {
        let now = SystemTime::now();
        let parts = cacerts::check(roots, certificate, key, chain, now)?;
        let issuer = Issuer::from_ca_cert_der(&parts.signer, parts.key)
            .map_err(|error| cacerts::problem("ca-cert.pem", error))?;
        let authority = Self {
            issuer,
            intermediates: parts.intermediates.iter().map(|der| to_pem(der)).collect(),
            roots_pem: parts.roots.iter().map(|der| to_pem(der)).collect(),
            roots: parts.described,
            not_before: parts.not_before,
            not_after: parts.not_after,
        };
        authority.verify_own(&parts.intermediates, &parts.roots)?;
        Ok(authority)
    }

    /// Verifies a certificate that this authority signs, as a workload would. This finds all remaining errors:
    /// an incomplete chain, a path that is too long, names that are not permitted.
    fn verify_own(
        &self,
        intermediates: &[CertificateDer<'static>],
        roots: &[CertificateDer<'static>],
    ) -> Result<(), Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(broken)?;
        let (leaf, _) = self.leaf(&key, Vec::new(), ONE_MINUTE, None)?;
        let chain: Vec<_> = std::iter::once(leaf.der()).chain(intermediates).cloned().collect();
        let check = PeerCheck::new(Live::new(Roots::new(roots.iter().cloned())?));
        let verified = check.verify(&chain, Role::Client, SystemTime::now());
        let refused = |error| {
            cacerts::problem(
                "cert-chain.pem",
                format!(
                    "a certificate signed with ca-cert.pem is rejected by peers that trust root-cert.pem ({error}); \
                     cert-chain.pem must hold every certificate from ca-cert.pem up to a root in root-cert.pem"
                ),
            )
        };
        verified.map_err(refused)
    }

    /// Returns the trust bundle: one or more roots, PEM.
    pub fn roots_pem(&self) -> &str {
        &self.roots_pem
    }

    /// Returns descriptions of the roots.
    pub fn described(&self) -> &[RootInfo] {
        &self.roots
    }

    /// Returns the latest start of validity of the certificates from the signing one up to its root.
    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }

    /// Returns the earliest end of validity of the certificates from the signing one up to its root. No
    /// certificate that the authority signs is valid longer.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Returns the roots for verification.
    ///
    /// # Errors
    /// None in practice, because the constructor parsed the same text.
    pub fn roots(&self) -> Result<Roots, Error> {
        Roots::from_pem(self.roots_pem.as_bytes())
    }

    /// Checks and signs a workload's request. Only the key of the request is used. The caller was authenticated
    /// by other means, and the request may name no other identity.
    ///
    /// # Errors
    /// The request is refused.
    pub fn sign(&self, csr_pem: &str, id: &SpiffeId, lifetime: Duration) -> Result<Signed, Error> {
        let csr = Csr::from_pem(csr_pem)?;
        csr.names_only(id, &[])?;
        self.issue(&csr, id, lifetime, None)
    }

    /// Signs a request whose names were checked. The certificate records its `origin`, if given.
    ///
    /// # Errors
    /// The ID cannot be encoded in a certificate, or the authority has expired.
    pub fn issue(
        &self,
        csr: &Csr,
        id: &SpiffeId,
        lifetime: Duration,
        origin: Option<&Origin>,
    ) -> Result<Signed, Error> {
        let (leaf, not_after) = self.leaf(&csr.key, vec![uri(id)?], lifetime, origin)?;
        let (_, read) =
            X509Certificate::from_der(leaf.der()).map_err(|error| Error::Certificate(error.to_string()))?;
        let (serial, key_sha256) = (read.raw_serial_as_string(), sha256(read.public_key().raw));
        let begins = u64::try_from(read.validity().not_before.timestamp()).unwrap_or_default();
        let not_before = SystemTime::UNIX_EPOCH + Duration::from_secs(begins);
        let intermediates = self.intermediates.iter().cloned();
        let chain =
            std::iter::once(leaf.pem()).chain(intermediates).chain([self.roots_pem.clone()]).collect();
        Ok(Signed { chain, serial, key_sha256, not_before, not_after })
    }

    /// Issues a certificate for a server with DNS names or addresses, such as the control plane itself.
    ///
    /// # Errors
    /// A name cannot be encoded in a certificate, or the authority has expired.
    pub fn server(
        &self,
        id: &SpiffeId,
        dns: &[String],
        ips: &[IpAddr],
        lifetime: Duration,
    ) -> Result<Identity, Error> {
        let mut names = vec![uri(id)?];
        for name in dns {
            names.push(SanType::DnsName(name.clone().try_into().map_err(broken)?));
        }
        names.extend(ips.iter().copied().map(SanType::IpAddress));
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(broken)?;
        let (leaf, _) = self.leaf(&key, names, lifetime, None)?;
        let chain = leaf.pem() + &self.intermediates.concat();
        Identity::from_pem(chain.as_bytes(), key.serialize_pem().as_bytes())
    }

    fn leaf(
        &self,
        key: &impl PublicKeyData,
        names: Vec<SanType>,
        lifetime: Duration,
        origin: Option<&Origin>,
    ) -> Result<(rcgen::Certificate, SystemTime), Error> {
        let now = SystemTime::now();
        if self.not_after <= now {
            return Err(Error::Certificate("the authority's own certificate has expired; replace it".into()));
        }
        let not_after = (now + lifetime).min(self.not_after);
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        // By default the serial number is derived from the key, but a key may be certified more than once (RFC
        // 5280, section 4.1.2.2).
        params.serial_number = Some(SerialNumber::from(serial()?.to_vec()));
        params.not_before = (now - margin(lifetime)).into();
        params.not_after = not_after.into();
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.custom_extensions.extend(origin.map(Origin::extension).transpose()?);
        Ok((params.signed_by(key, &self.issuer).map_err(broken)?, not_after))
    }
}

/// Returns the SHA-256 of bytes, hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256 as SUITE;
    let digest = SUITE.tls13().map(|suite| suite.common.hash_provider.hash(bytes));
    digest.iter().flat_map(|digest| digest.as_ref()).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a unique serial number.
fn serial() -> Result<[u8; 16], Error> {
    let mut serial = [0; 16];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut serial).map_err(|_| Error::Certificate("the system provides no randomness".into()))?;
    // A serial number is positive and encoded without leading zeros.
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(serial)
}

/// Returns the tolerated clock skew for certificates of this lifetime.
pub(crate) fn margin(lifetime: Duration) -> Duration {
    CLOCK_SKEW.min(lifetime / 10)
}

/// A self-signed root with its key (ECDSA P-256), PEM.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Root {
    /// Certificate, PEM.
    pub certificate: String,
    pub(crate) key: String,
}

impl Root {
    /// Returns a root that another program has made.
    pub(crate) fn new(certificate: &str, key: &str) -> Self {
        // Certificates of a bundle follow each other.
        let line = |text: &str| format!("{}\n", text.trim_end());
        Self { certificate: line(certificate), key: line(key) }
    }

    pub(crate) fn has_key_of(&self, other: &Self) -> bool {
        self.key == other.key
    }

    /// Generates a root that is valid from now for `lifetime`.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub fn generate(lifetime: Duration, now: SystemTime) -> Result<Self, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(broken)?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        // Distinct names, because several roots are trusted while one replaces another.
        params.distinguished_name.push(DnType::OrganizationName, "skysail");
        params.distinguished_name.push(DnType::CommonName, format!("mesh root {:08x}", fastrand::u32(..)));
        params.not_before = (now - margin(lifetime)).into();
        params.not_after = (now + lifetime).into();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(broken)?;
        Ok(Self { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

fn uri(id: &SpiffeId) -> Result<SanType, Error> {
    Ok(SanType::URI(id.to_string().try_into().map_err(broken)?))
}

fn broken(error: rcgen::Error) -> Error {
    Error::Certificate(error.to_string())
}

fn to_pem(der: &[u8]) -> String {
    pem::encode_config(
        &pem::Pem::new("CERTIFICATE", der),
        pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{csr::Refusal, request::KeyAndCsr};

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn certificates_name_the_callers_identity_and_expire_with_the_authority() {
        let authority = Authority::ephemeral().unwrap();
        let id = SpiffeId::new("cluster.local", "default", "reviews");
        let request = KeyAndCsr::generate(Some(&id)).unwrap();
        let signed = authority.sign(&request.csr_pem, &id, HOUR).unwrap();
        assert_eq!(signed.chain.len(), 2, "leaf and root");
        assert_eq!(signed.chain[1], authority.roots_pem());
        let identity = request.finish(signed.pem().as_bytes()).unwrap();
        assert_eq!(identity.peer.spiffe, Some(id.clone()));
        assert!(identity.not_before < SystemTime::now());
        assert!(identity.not_after <= signed.not_after && identity.not_after > SystemTime::now() + HOUR / 2);

        let minute = authority.sign(&request.csr_pem, &id, Duration::from_secs(60)).unwrap();
        let minute_identity = request.finish(minute.pem().as_bytes()).unwrap();
        let due = minute_identity.renewal().left(SystemTime::now());
        assert!(due > Duration::from_secs(20) && due < Duration::from_secs(45), "{due:?}");

        let forever = authority.sign(&request.csr_pem, &id, 100_000 * HOUR).unwrap();
        assert!(forever.not_after <= authority.not_after());
        let serial = |signed: &Signed| {
            let leaf = pem::parse(&signed.chain[0]).unwrap();
            let (_, leaf) = x509_parser::parse_x509_certificate(leaf.contents()).unwrap();
            leaf.raw_serial_as_string()
        };
        assert_ne!(serial(&minute), serial(&forever), "one key, two certificates");
        let other = KeyAndCsr::generate(None).unwrap();
        assert!(other.finish(signed.pem().as_bytes()).is_err(), "the chain is another key's");
        let somebody = SpiffeId::new("cluster.local", "default", "ratings");
        let foreign = authority.sign(&request.csr_pem, &somebody, HOUR);
        assert!(matches!(foreign, Err(Error::Refused(Refusal::ForeignName { .. }))), "{foreign:?}");
    }

    #[test]
    fn an_expired_authority_signs_nothing() {
        let ended = Authority { not_after: SystemTime::now(), ..Authority::ephemeral().unwrap() };
        let request = KeyAndCsr::generate(None).unwrap();
        let refused = ended.sign(&request.csr_pem, &SpiffeId::new("a", "b", "c"), HOUR).unwrap_err();
        assert!(refused.to_string().contains("has expired"), "{refused}");
    }
}

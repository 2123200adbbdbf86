//! The mesh's certificate authority: signs workload certificates for identities that others have checked.
//!
//! Its files are named as Istio's plugged-in authority's: `root-cert.pem` (what everybody trusts),
//! `ca-cert.pem` and `ca-key.pem` (what signs), optionally `cert-chain.pem` (from `ca-cert` up to the root).
//! Made by us, the root itself signs. ECDSA P-256 throughout.

use std::{
    fs,
    io::Write as _,
    net::IpAddr,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};
use skysail_core::SpiffeId;

use crate::{
    Error,
    identity::{Identity, Roots, certificates},
    request::KeyAndCsr,
};

/// A new root's life.
const ROOT_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Certificates are valid from a little before they are made, for machines whose clock is behind. Short-lived ones
/// only by a tenth of their life.
const CLOCK_SKEW: Duration = Duration::from_secs(120);

/// Signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    root_pem: String,
    /// Sent after each leaf: intermediates, then the root.
    chain: Vec<String>,
    not_after: SystemTime,
}

/// A signed certificate.
#[derive(Clone, Debug)]
pub struct Signed {
    /// PEM certificates, each its own text: the leaf, intermediates, the root last.
    pub chain: Vec<String>,
    /// When it ends.
    pub not_after: SystemTime,
}

impl Signed {
    /// The chain as one PEM text.
    pub fn pem(&self) -> String {
        self.chain.concat()
    }
}

impl Authority {
    /// Reads the authority of a folder; makes one there if it holds none.
    ///
    /// # Errors
    /// When the folder cannot be read or written, or holds only a part of an authority or a broken one.
    pub fn load_or_create(folder: &Path) -> Result<Self, Error> {
        let present = ["root-cert.pem", "ca-cert.pem", "ca-key.pem"].map(|name| folder.join(name).exists());
        if present == [false; 3] {
            fs::create_dir_all(folder).map_err(|error| file_error(folder, error))?;
            Self::create(folder)?;
        }
        let root = read(&folder.join("root-cert.pem"))?;
        let certificate = read(&folder.join("ca-cert.pem"))?;
        let key = read(&folder.join("ca-key.pem"))?;
        let chain_path = folder.join("cert-chain.pem");
        let chain = if chain_path.exists() { read(&chain_path)? } else { certificate.clone() };
        Self::from_pem(&root, &certificate, &key, &chain)
    }

    /// A new self-signed authority that is kept nowhere.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn ephemeral() -> Result<Self, Error> {
        let (certificate, key) = self_signed()?;
        Self::from_pem(&certificate, &certificate, &key, &certificate)
    }

    /// An authority from PEM texts: the root, the signing certificate, its key, and the chain from the signing
    /// certificate up.
    ///
    /// # Errors
    /// When one cannot be parsed or the key is not the certificate's.
    pub fn from_pem(root: &str, certificate: &str, key: &str, chain: &str) -> Result<Self, Error> {
        // Checks that the key is the certificate's.
        let signing = Identity::from_pem(certificate.as_bytes(), key.as_bytes())?;
        let pair = KeyPair::from_pem(key).map_err(|error| Error::Key(error.to_string()))?;
        let issuer = Issuer::from_ca_cert_pem(certificate, pair)
            .map_err(|error| Error::Certificate(error.to_string()))?;
        let roots = certificates(root.as_bytes(), "root certificate")?;
        let mut after_leaf: Vec<_> = certificates(chain.as_bytes(), "certificate chain")?
            .iter()
            .filter(|certificate| !roots.contains(certificate))
            .map(|der| to_pem(der))
            .collect();
        after_leaf.extend(roots.iter().map(|der| to_pem(der)));
        Ok(Self { issuer, root_pem: root.to_owned(), chain: after_leaf, not_after: signing.not_after })
    }

    /// What everybody trusts, PEM.
    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    /// When the signing certificate ends; nothing it signs is valid longer.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// The roots for verification.
    ///
    /// # Errors
    /// Not after the authority was read, which parsed the same text.
    pub fn roots(&self) -> Result<Roots, Error> {
        Roots::from_pem(self.root_pem.as_bytes())
    }

    /// Signs a workload's request. Of the request only the key counts: who asks was established by other means,
    /// and names the request wishes for are ignored.
    ///
    /// # Errors
    /// When the request is broken or not signed by its own key.
    pub fn sign(&self, csr_pem: &str, id: &SpiffeId, lifetime: Duration) -> Result<Signed, Error> {
        let uri =
            id.to_string().try_into().map_err(|error: rcgen::Error| Error::Request(error.to_string()))?;
        self.sign_names(csr_pem, vec![SanType::URI(uri)], lifetime)
    }

    /// Makes a certificate for a server that is found by name or address, such as the control plane itself.
    ///
    /// # Errors
    /// When a name cannot stand in a certificate.
    pub fn server(
        &self,
        id: &SpiffeId,
        dns: &[String],
        ips: &[IpAddr],
        lifetime: Duration,
    ) -> Result<Identity, Error> {
        let refused = |error: rcgen::Error| Error::Certificate(error.to_string());
        let mut names = vec![SanType::URI(id.to_string().try_into().map_err(refused)?)];
        for name in dns {
            names.push(SanType::DnsName(name.clone().try_into().map_err(refused)?));
        }
        names.extend(ips.iter().copied().map(SanType::IpAddress));
        let request = KeyAndCsr::generate(None)?;
        let signed = self.sign_names(&request.csr_pem, names, lifetime)?;
        request.finish(signed.pem().as_bytes())
    }

    fn sign_names(&self, csr_pem: &str, names: Vec<SanType>, lifetime: Duration) -> Result<Signed, Error> {
        let refused = |error: rcgen::Error| Error::Request(error.to_string());
        let request = CertificateSigningRequestParams::from_pem(csr_pem).map_err(refused)?;
        let now = SystemTime::now();
        let not_after = (now + lifetime).min(self.not_after);
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.not_before = (now - CLOCK_SKEW.min(lifetime / 10)).into();
        params.not_after = not_after.into();
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let leaf = params.signed_by(&request.public_key, &self.issuer).map_err(refused)?;
        let chain = std::iter::once(leaf.pem()).chain(self.chain.iter().cloned()).collect();
        Ok(Signed { chain, not_after })
    }

    /// Makes a root in a folder. The key is written last: without it the folder counts as broken, not as good.
    fn create(folder: &Path) -> Result<(), Error> {
        let (certificate, key) = self_signed()?;
        write(&folder.join("root-cert.pem"), &certificate, 0o644)?;
        write(&folder.join("ca-cert.pem"), &certificate, 0o644)?;
        write(&folder.join("ca-key.pem"), &key, 0o600)
    }
}

/// A new root: certificate and key, PEM.
fn self_signed() -> Result<(String, String), Error> {
    let refused = |error: rcgen::Error| Error::Certificate(error.to_string());
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(refused)?;
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    // Several roots of one name would be hard to tell apart while one replaces the other.
    params.distinguished_name.push(DnType::OrganizationName, "skysail");
    params.distinguished_name.push(DnType::CommonName, format!("mesh root {:08x}", fastrand::u32(..)));
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = (now + ROOT_LIFETIME).into();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let certificate = params.self_signed(&key).map_err(refused)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

fn to_pem(der: &[u8]) -> String {
    pem::encode_config(
        &pem::Pem::new("CERTIFICATE", der),
        pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF),
    )
}

fn read(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(|error| file_error(path, error))
}

fn write(path: &Path, text: &str, mode: u32) -> Result<(), Error> {
    let open = || fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    open()
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .map_err(|error| file_error(path, error))
}

fn file_error(path: &Path, error: std::io::Error) -> Error {
    Error::File { path: path.display().to_string(), error }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn an_authority_stays_the_same_over_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let first = Authority::load_or_create(folder.path()).unwrap();
        let second = Authority::load_or_create(folder.path()).unwrap();
        assert_eq!(first.root_pem(), second.root_pem());
        let mode = fs::metadata(folder.path().join("ca-key.pem")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);

        fs::remove_file(folder.path().join("ca-key.pem")).unwrap();
        assert!(Authority::load_or_create(folder.path()).is_err(), "half an authority is not replaced");
    }

    #[test]
    fn certificates_name_whom_the_caller_says_and_end_in_time() {
        let authority = Authority::ephemeral().unwrap();
        let request = KeyAndCsr::generate(None).unwrap();
        let id = SpiffeId::new("cluster.local", "default", "reviews");
        let signed = authority.sign(&request.csr_pem, &id, HOUR).unwrap();
        assert_eq!(signed.chain.len(), 2, "leaf and root");
        assert_eq!(signed.chain[1].trim(), authority.root_pem().trim());
        let identity = request.finish(signed.pem().as_bytes()).unwrap();
        assert_eq!(identity.peer.spiffe, Some(id.clone()));
        assert!(identity.not_before < SystemTime::now());
        assert!(identity.not_after <= signed.not_after && identity.not_after > SystemTime::now() + HOUR / 2);

        let minute = authority.sign(&request.csr_pem, &id, Duration::from_secs(60)).unwrap();
        let due = request.finish(minute.pem().as_bytes()).unwrap().renewal_due();
        assert!(due > Duration::from_secs(20) && due < Duration::from_secs(45), "{due:?}");

        let forever = authority.sign(&request.csr_pem, &id, ROOT_LIFETIME * 2).unwrap();
        assert!(forever.not_after <= authority.not_after());
        let other = KeyAndCsr::generate(None).unwrap();
        assert!(other.finish(signed.pem().as_bytes()).is_err(), "the chain is another key's");
        assert!(authority.sign("no request", &id, HOUR).is_err());
    }
}

//! Certificates of one benchmark: an authority, a client and a server, with ECDSA P-256 as in a mesh.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType,
};

/// A certificate authority.
pub(crate) type Authority = CertifiedIssuer<'static, KeyPair>;

/// Identity of a sidecar, as names and files.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// SPIFFE ID, in the URI name of the certificate.
    pub(crate) id: String,
    /// DNS name, for peers that check nothing else.
    pub(crate) dns: String,
    /// Certificate file, PEM.
    pub(crate) certificate: PathBuf,
    /// Key file, PEM.
    pub(crate) key: PathBuf,
    /// File with certificate and key.
    pub(crate) bundle: PathBuf,
}

/// Certificates that the two sidecars of a benchmark need to trust each other.
#[derive(Clone, Debug)]
pub(crate) struct Certificates {
    /// Certificate of the authority, PEM.
    pub(crate) root: PathBuf,
    pub(crate) client: Identity,
    pub(crate) server: Identity,
}

impl Certificates {
    /// Creates the certificates in this folder.
    pub(crate) fn make(folder: &Path) -> anyhow::Result<Self> {
        let authority = authority()?;
        let root = folder.join("root.pem");
        fs::write(&root, authority.pem()).with_context(|| format!("writing {}", root.display()))?;
        Ok(Self {
            root,
            client: workload("client", &authority, folder)?,
            server: workload("server", &authority, folder)?,
        })
    }
}

/// Creates an authority in the folder, with the files that a control plane reads. Returns for each SPIFFE ID the
/// certificates of a client. `dns` is the DNS name by which clients verify the control plane.
pub(crate) fn of_control_plane(
    folder: &Path,
    ids: impl IntoIterator<Item = String>,
    dns: &str,
) -> anyhow::Result<Vec<Certificates>> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let authority = authority()?;
    let root = folder.join("root-cert.pem");
    for (path, text) in [
        (root.clone(), authority.pem()),
        (folder.join("ca-cert.pem"), authority.pem()),
        (folder.join("ca-key.pem"), authority.key().serialize_pem()),
    ] {
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    let of = |(number, id): (usize, String)| {
        let client = identity(&format!("client-{number}"), id, dns, &authority, folder)?;
        Ok(Certificates { root: root.clone(), server: client.clone(), client })
    };
    ids.into_iter().enumerate().map(of).collect()
}

/// Creates an authority.
pub(crate) fn authority() -> anyhow::Result<Authority> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "skysail bench");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)?)
}

/// A certificate of a host and its key (PEM), and the certificate as sent in a handshake (DER).
pub(crate) struct HostCertificate {
    pub(crate) chain: String,
    pub(crate) key: String,
    pub(crate) der: Vec<u8>,
}

/// Creates a certificate for a host.
pub(crate) fn of_host(authority: &Authority, host: &str) -> anyhow::Result<HostCertificate> {
    let mut params = CertificateParams::new([host.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let certificate = params.signed_by(&key, authority)?;
    Ok(HostCertificate {
        chain: certificate.pem(),
        key: key.serialize_pem(),
        der: certificate.der().to_vec(),
    })
}

fn workload(name: &str, authority: &Authority, folder: &Path) -> anyhow::Result<Identity> {
    let id = format!("spiffe://cluster.local/ns/default/sa/{name}");
    identity(name, id, &format!("{name}.mesh.local"), authority, folder)
}

fn identity(
    name: &str,
    id: String,
    dns: &str,
    authority: &Authority,
    folder: &Path,
) -> anyhow::Result<Identity> {
    let identity = Identity {
        id,
        dns: dns.to_owned(),
        certificate: folder.join(format!("{name}.crt")),
        key: folder.join(format!("{name}.key")),
        bundle: folder.join(format!("{name}.pem")),
    };
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.subject_alt_names = vec![
        SanType::URI(identity.id.as_str().try_into()?),
        SanType::DnsName(identity.dns.as_str().try_into()?),
    ];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    let certificate = params.signed_by(&key, authority)?.pem();
    let key = key.serialize_pem();
    let write = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    write(&identity.certificate, &certificate)?;
    write(&identity.key, &key)?;
    write(&identity.bundle, &format!("{certificate}{key}"))?;
    Ok(identity)
}

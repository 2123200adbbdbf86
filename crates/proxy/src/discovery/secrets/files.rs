//! Secrets whose content is in files, read again when the files change.
//!
//! As in Envoy, this applies to secrets from discovery, be it a server or a file (`path_config_source`). Files that the
//! bootstrap itself names are read once. Directories are watched instead of files, because files are replaced by
//! renaming; Kubernetes replaces only a link beside them. If the content is unusable, a warning is logged and the
//! previous content stays in use. An example is a certificate whose key is not there yet.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use skysail_proto::Codec as _;
use skysail_xds::{
    Kind,
    envoy::pb::envoy::{
        config::core::v3::{DataSource, Node, WatchedDirectory, data_source::Specifier},
        extensions::transport_sockets::tls::v3::{
            CertificateValidationContext, Secret, TlsCertificate, secret::Type,
        },
        service::discovery::v3::DiscoveryResponse,
    },
};

use super::{
    Secrets,
    watch::{Watch, folders_of_file},
};
use crate::translate::{
    SecretName, Translator,
    bootstrap::convert::{self, Conversion},
};

/// Prefix of the names of secrets with a certificate and its key: `file-cert:CERTIFICATE~KEY`.
const CERTIFICATE: &str = "file-cert:";
/// Prefix of the names of secrets with trusted certificates: `file-root:FILE`.
const ROOT: &str = "file-root:";
/// File name for the trusted certificates of the operating system.
const SYSTEM: &str = "system";
/// Files of trusted certificates of common systems. Source: Istio's agent, and Go's `crypto/x509`.
const SYSTEM_FILES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Returns the secret for a name that contains file names, as Istio's agent does; `None` for another name.
pub(crate) fn of_agent(name: &str) -> Option<Secret> {
    let file = |path: &str| {
        Some(DataSource { specifier: Some(Specifier::Filename(path.to_owned())), ..DataSource::default() })
    };
    let content = if let Some(pair) = name.strip_prefix(CERTIFICATE) {
        let (chain, key) = pair.split_once('~')?;
        Type::TlsCertificate(TlsCertificate {
            certificate_chain: file(chain),
            private_key: file(key),
            ..TlsCertificate::default()
        })
    } else {
        let root = name.strip_prefix(ROOT)?;
        let system = || SYSTEM_FILES.iter().find(|path| Path::new(path).exists()).unwrap_or(&SYSTEM_FILES[0]);
        let path = if root == SYSTEM { system() } else { root };
        Type::ValidationContext(CertificateValidationContext {
            trusted_ca: file(path),
            ..CertificateValidationContext::default()
        })
    };
    Some(Secret { name: name.to_owned(), r#type: Some(content) })
}

/// Source of a secret that names files or is in a file.
pub(super) enum FileOrigin {
    /// From a server; the secret names files.
    Delivered(Secret),
    /// In a file; `found` is the content found last.
    File { path: PathBuf, watched: Option<PathBuf>, found: Option<(Vec<u8>, Secret)> },
}

/// Keeps a secret up to date with its files.
pub(super) async fn follow(secrets: Secrets, name: SecretName, mut origin: FileOrigin) -> Infallible {
    let mut folders = origin.folders();
    let mut watch = Watch::new(&folders);
    let (mut taken, mut warned) = (None, String::new());
    loop {
        let read = origin.secret(&secrets, &name).await.and_then(|mut secret| {
            let all: BTreeSet<_> = origin.folders().into_iter().chain(folders_of(&mut secret)).collect();
            if all == folders {
                read_in(&mut secret)?;
                return Ok(Some(secret));
            }
            folders = all;
            Ok(None)
        });
        let outcome = match read {
            Ok(None) => {
                watch = Watch::new(&folders);
                continue;
            }
            Ok(secret) if secret == taken => Ok(()),
            Ok(Some(secret)) => {
                let stored = secrets.fill(&name, &secret).and_then(|()| secrets.notify());
                stored.map_err(anyhow::Error::new).map(|()| {
                    tracing::info!(secret = %name.name, "read from files");
                    taken = Some(secret);
                })
            }
            Err(error) => Err(error),
        };
        let reason = outcome.err().map(|error| format!("{error:#}")).unwrap_or_default();
        if !reason.is_empty() && reason != warned {
            tracing::warn!(secret = %name.name, reason, "cannot use the secret's files; the current secret stays in use");
        }
        warned = reason;
        if watch.changed().await {
            watch = Watch::new(&folders);
        }
    }
}

impl FileOrigin {
    async fn secret(&mut self, secrets: &Secrets, name: &SecretName) -> anyhow::Result<Secret> {
        let (path, found) = match self {
            Self::Delivered(secret) => return Ok(secret.clone()),
            Self::File { path, found, .. } => (path, found),
        };
        let text = std::fs::read(&*path).with_context(|| format!("cannot read {}", path.display()))?;
        if let Some((_, secret)) = found.as_ref().filter(|(before, _)| *before == text) {
            return Ok(secret.clone());
        }
        let input = text.clone();
        let converted =
            tokio::task::spawn_blocking(|| convert::convert_in_child(Conversion::Discovery, input));
        let in_file = || path.display().to_string();
        let body = converted.await?.with_context(in_file)?;
        let translator = Translator { tls: &secrets.tls, node: &Node::default(), strict: true };
        let response: DiscoveryResponse = translator.decode(&body).with_context(in_file)?;
        for any in response.resources.iter().filter(|any| any.type_url == Kind::Secret.url()) {
            let secret = Secret::from_slice(&any.value).with_context(in_file)?;
            if *secret.name == *name.name {
                *found = Some((text, secret.clone()));
                return Ok(secret);
            }
        }
        bail!("{} has no secret {:?}", path.display(), name.name)
    }

    fn folders(&self) -> BTreeSet<PathBuf> {
        match self {
            Self::Delivered(_) => BTreeSet::new(),
            Self::File { path, watched, .. } => folders_of_file(path).chain(watched.clone()).collect(),
        }
    }
}

impl FileOrigin {
    /// Returns the source of a file of revocation lists that a TLS context names.
    pub(super) fn crl(path: &Path, watched: Option<PathBuf>) -> Self {
        let name = path.to_string_lossy().into_owned();
        let folder = watched.map(|folder| WatchedDirectory {
            path: folder.to_string_lossy().into_owned(),
            ..WatchedDirectory::default()
        });
        let context = CertificateValidationContext {
            crl: Some(DataSource {
                specifier: Some(Specifier::Filename(name.clone())),
                ..DataSource::default()
            }),
            watched_directory: folder,
            ..CertificateValidationContext::default()
        };
        Self::Delivered(Secret { name, r#type: Some(Type::ValidationContext(context)) })
    }
}

/// Returns whether a secret names files.
pub(super) fn names_files(secret: &Secret) -> bool {
    !folders_of(&mut secret.clone()).is_empty()
}

/// Returns the directories to watch for a secret that names files.
fn folders_of(secret: &mut Secret) -> BTreeSet<PathBuf> {
    let watched = match &secret.r#type {
        Some(Type::TlsCertificate(certificate)) => certificate.watched_directory.as_ref(),
        Some(Type::ValidationContext(context)) => context.watched_directory.as_ref(),
        _ => None,
    };
    let watched = watched.map(|folder| PathBuf::from(&folder.path));
    let files: BTreeSet<_> = sources(secret)
        .filter_map(|source| match &source.specifier {
            Some(Specifier::Filename(path)) => Some(folders_of_file(Path::new(path))),
            _ => None,
        })
        .flatten()
        .collect();
    if files.is_empty() { files } else { files.into_iter().chain(watched).collect() }
}

/// Replaces the names of files by their content.
fn read_in(secret: &mut Secret) -> anyhow::Result<()> {
    for source in sources(secret) {
        if let Some(Specifier::Filename(path)) = &source.specifier {
            let content = std::fs::read(path).with_context(|| format!("cannot read {path}"))?;
            source.specifier = Some(Specifier::InlineBytes(content));
        }
    }
    Ok(())
}

fn sources(secret: &mut Secret) -> impl Iterator<Item = &mut DataSource> {
    let (first, second) = match &mut secret.r#type {
        Some(Type::TlsCertificate(certificate)) => {
            (certificate.certificate_chain.as_mut(), certificate.private_key.as_mut())
        }
        Some(Type::ValidationContext(context)) => (context.trusted_ca.as_mut(), context.crl.as_mut()),
        _ => (None, None),
    };
    first.into_iter().chain(second)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::translate::SecretSource;

    /// Replaces the certificate and key files.
    fn issue(folder: &Path, account: &str) {
        let authority = skysail_identity::Authority::ephemeral().unwrap();
        let request = skysail_identity::KeyAndCsr::generate(None).unwrap();
        let id = skysail_core::SpiffeId::new("cluster.local", "default", account);
        let signed = authority.sign(&request.csr_pem, &id, Duration::from_secs(3600)).unwrap();
        for (name, content) in [("cert.pem", signed.pem()), ("key.pem", request.key_pem())] {
            std::fs::write(folder.join("new"), content).unwrap();
            std::fs::rename(folder.join("new"), folder.join(name)).unwrap();
        }
    }

    #[test]
    fn names_of_the_agent_name_files() {
        let Some(Type::TlsCertificate(pair)) = of_agent("file-cert:/c.pem~/k.pem").unwrap().r#type else {
            panic!("no certificate")
        };
        let name = |file: Option<DataSource>| match file.unwrap().specifier {
            Some(Specifier::Filename(name)) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (name(pair.certificate_chain), name(pair.private_key)),
            ("/c.pem".into(), "/k.pem".into())
        );
        let root = |text: &str| match of_agent(text).unwrap().r#type {
            Some(Type::ValidationContext(context)) => name(context.trusted_ca),
            other => panic!("{other:?}"),
        };
        assert_eq!(root("file-root:/r.pem"), "/r.pem");
        assert!(root("file-root:system").starts_with("/etc/"));
        for other in ["default", "ROOTCA", "kubernetes://a", "file-cert:/c.pem"] {
            assert_eq!(of_agent(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn the_files_that_a_delivered_secret_names_are_read_again() {
        let folder = tempfile::tempdir().unwrap();
        issue(folder.path(), "before");
        let file = |name: &str| {
            let path = folder.path().join(name).to_str().unwrap().to_owned();
            Some(DataSource { specifier: Some(Specifier::Filename(path)), ..DataSource::default() })
        };
        let certificate = TlsCertificate {
            certificate_chain: file("cert.pem"),
            private_key: file("key.pem"),
            ..TlsCertificate::default()
        };
        let secret = Secret { name: "s".to_owned(), r#type: Some(Type::TlsCertificate(certificate)) };
        let secrets = Secrets::new(Arc::default());
        let name = |source| SecretName { source, name: "s".into() };
        let (delivered, written) = (name(SecretSource::Ads), name(SecretSource::Static));
        secrets.store(&delivered, &secret).unwrap();
        secrets.store(&written, &secret).unwrap();
        let uri = |name: &SecretName| secrets.tls.identity(name).get().unwrap().peer.uris[0].clone();
        assert!(uri(&delivered).ends_with("/before"));
        issue(folder.path(), "after");
        let changed = async {
            while !uri(&delivered).ends_with("/after") {
                secrets.changed.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), changed).await.unwrap();
        assert!(uri(&written).ends_with("/before"), "what a bootstrap file holds is read once");
    }
}

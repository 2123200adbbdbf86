//! The sidecar's own certificate, and the trusted roots for the control plane.
//!
//! The roots are those of `--ca-root` and those issued with the certificate; while a root is replaced, either
//! may be ahead of the other. `--ca-root` and `--token` are watched. A change ends the pause between connection
//! attempts. New roots also trigger a renewal, because a different authority signs from then on.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, bail};
use skysail_core::SpiffeId;
use skysail_identity::{Identity, KeyAndCsr, Live, PeerCheck, Roots, TlsSpec, renewal};
use skysail_xds::{
    certificates,
    envoy::pb::{envoy::config::core::v3::Node, google::protobuf::Struct},
    istio::{self, IstioCertificateRequest},
};
use tokio::{sync::watch, time::sleep};
use tonic::metadata::MetadataMap;

use super::{
    Secrets, own_names, pause,
    watch::{Watch, folders_of_file},
};
use crate::discovery::remote::{Remote, RemoteAddress, RemoteTls};

/// DNS name that the control plane's certificate must contain.
pub(crate) const CONTROL_PLANE: &str = "istiod.istio-system.svc";
/// Sidecars spread their renewals after a change of `--ca-root` over this time.
const RENEWAL_SPREAD: Duration = Duration::from_secs(5);

/// Address and credentials of the mesh's control plane.
#[derive(Clone)]
pub(crate) struct Mesh {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) ca_root: PathBuf,
    pub(crate) token: PathBuf,
}

/// The sidecar's own certificate, issued by the control plane.
pub(crate) struct OwnCertificate {
    /// Control plane, with the sidecar's client certificate.
    pub(crate) remote: Remote,
    /// Control plane, without a client certificate.
    anonymous: Remote,
    node: Node,
    mesh: Mesh,
    roots: Arc<Live<Roots>>,
    /// Roots issued with the certificate, PEM.
    issued_roots: Mutex<String>,
    files: watch::Sender<Files>,
    renewed: watch::Sender<()>,
}

/// A certificate as the control plane issued it, with its key and roots.
pub(crate) struct Issued {
    pub(crate) identity: Arc<Identity>,
    /// Certificate chain, leaf first, PEM.
    pub(crate) chain_pem: String,
    /// Private key, PEM.
    pub(crate) key_pem: String,
    /// Trusted roots of the workloads, PEM.
    pub(crate) roots_pem: String,
}

/// Content of `--ca-root` and `--token`. A file that cannot be read keeps its previous content.
#[derive(Clone, Default, PartialEq, Eq)]
struct Files {
    roots: String,
    token: String,
}

impl Files {
    fn read(&mut self, mesh: &Mesh) {
        for (content, path) in [(&mut self.roots, &mesh.ca_root), (&mut self.token, &mesh.token)] {
            if let Ok(text) = std::fs::read_to_string(path) {
                *content = text;
            }
        }
    }
}

/// Returns the headers of a request to the control plane, with the token that the file holds now.
pub(crate) fn authorization(token: &Path) -> anyhow::Result<MetadataMap> {
    let text =
        std::fs::read_to_string(token).with_context(|| format!("cannot read --token {}", token.display()))?;
    let mut metadata = MetadataMap::new();
    let value = format!("Bearer {}", text.trim()).parse();
    metadata.insert(
        "authorization",
        value.with_context(|| format!("--token {} is not a token", token.display()))?,
    );
    Ok(metadata)
}

impl OwnCertificate {
    /// Prepares connections to the mesh's control plane. They present the certificate of `secrets` once there
    /// is one.
    ///
    /// # Errors
    /// `--ca-root` cannot be used.
    pub(crate) fn new(secrets: &Secrets, mesh: Mesh, node: Node, mark: Option<u32>) -> anyhow::Result<Self> {
        let path = mesh.ca_root.display();
        let pem = std::fs::read(&mesh.ca_root).with_context(|| format!("cannot read --ca-root {path}"))?;
        let roots = Live::new(Roots::from_pem(&pem).with_context(|| format!("--ca-root {path}"))?);
        let remote = |identities| -> anyhow::Result<Remote> {
            let spec = TlsSpec {
                identities,
                peer: Some(PeerCheck { host_name: true, ..PeerCheck::new(Arc::clone(&roots)) }),
                alpn: vec![b"h2".to_vec()],
                ..TlsSpec::default()
            };
            let tls = RemoteTls::Fixed(spec.client()?, CONTROL_PLANE.try_into()?);
            Ok(Remote { place: RemoteAddress::Tcp(mesh.host.clone(), mesh.port), tls: Some(tls), mark })
        };
        let mut files = Files::default();
        files.read(&mesh);
        Ok(Self {
            remote: remote(vec![secrets.tls.identity(&own_names().0)])?,
            anonymous: remote(Vec::new())?,
            node,
            roots,
            issued_roots: Mutex::default(),
            files: watch::Sender::new(files),
            renewed: secrets.renewed.clone(),
            mesh,
        })
    }

    /// Obtains the first certificate and renews it from then on; calls `take` with each. Never returns.
    pub(crate) async fn keep(self, take: impl FnMut(Issued) -> anyhow::Result<()>) -> Infallible {
        tokio::select! {
            never = self.renew(take) => never,
            never = self.follow_files() => never,
        }
    }

    async fn renew(&self, mut take: impl FnMut(Issued) -> anyhow::Result<()>) -> Infallible {
        let (mut failures, mut files) = (0, self.files.subscribe());
        loop {
            let used = files.borrow_and_update().clone();
            let obtained = self.obtain(failures).await.and_then(|issued| {
                issued
                    .roots_pem
                    .clone_into(&mut self.issued_roots.lock().unwrap_or_else(PoisonError::into_inner));
                self.trust();
                let identity = Arc::clone(&issued.identity);
                take(issued)?;
                Ok(identity)
            });
            match obtained {
                Ok(identity) => {
                    failures = 0;
                    let renewal = identity.renewal();
                    let next = renewal.left(SystemTime::now());
                    tracing::info!(principal = ?identity.peer.uris, ?next, "certificate obtained");
                    let replaced = async {
                        // The returned reference locks the channel, so it is dropped before the sleep.
                        drop(files.wait_for(|now| now.roots != used.roots).await);
                        sleep(RENEWAL_SPREAD.mul_f64(fastrand::f64())).await;
                    };
                    // The wait ends when the renewal is due: a certificate may be valid for only seconds.
                    tokio::select! {
                        () = renewal.wait(SystemTime::now) => {}
                        () = replaced => {}
                    }
                }
                Err(error) => {
                    failures += 1;
                    let next = renewal::retry(failures, fastrand::f64());
                    let error = format!("{error:#}");
                    tracing::warn!(error, pause = ?next, "cannot obtain a certificate from the control plane");
                    pause(next, files.changed()).await;
                }
            }
        }
    }

    async fn follow_files(&self) -> Infallible {
        let folders = || -> BTreeSet<_> {
            [&self.mesh.ca_root, &self.mesh.token]
                .into_iter()
                .flat_map(|path| folders_of_file(path))
                .collect()
        };
        let mut watch = Watch::new(&folders());
        loop {
            let mut files = self.files.borrow().clone();
            files.read(&self.mesh);
            if files != *self.files.borrow() {
                let new_roots = files.roots != self.files.borrow().roots;
                self.files.send_replace(files);
                if new_roots {
                    tracing::info!(file = %self.mesh.ca_root.display(), "--ca-root has changed");
                    self.trust();
                }
                self.renewed.send_replace(());
            }
            if watch.changed().await {
                watch = Watch::new(&folders());
            }
        }
    }

    /// Trusts the roots of the file and those issued with the certificate.
    fn trust(&self) {
        let issued = self.issued_roots.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let pem = format!("{issued}\n{}", self.files.borrow().roots);
        match Roots::from_pem(pem.as_bytes()) {
            Ok(roots) => self.roots.set(Arc::new(roots)),
            Err(error) => {
                let file = self.mesh.ca_root.display();
                tracing::warn!(%file, %error, "--ca-root cannot be used; the previous roots stay in use");
            }
        }
    }

    /// Obtains a certificate for a new key. After a failure every other attempt presents no client certificate:
    /// a replaced authority's successor rejects the old certificate, while the token is still valid.
    async fn obtain(&self, failures: u32) -> anyhow::Result<Issued> {
        let id = self.spiffe_id();
        let request = KeyAndCsr::generate(id.as_ref())?;
        let metadata = authorization(&self.mesh.token)?;
        let remote = if failures.is_multiple_of(2) { &self.remote } else { &self.anonymous };
        let channel = remote.connect().await.map_err(|error| anyhow::anyhow!(chain(&*error)))?;
        let message = IstioCertificateRequest {
            csr: request.csr_pem.clone(),
            validity_duration: 0,
            metadata: Some(self.request_metadata()),
        };
        let chain = certificates::create_certificate(channel, metadata, message).await.map_err(|status| {
            anyhow::anyhow!("the control plane refused to sign: {} ({:?})", status.message(), status.code())
        })?;
        let Some((root, own)) = chain.split_last().filter(|(_, own)| !own.is_empty()) else {
            bail!("the control plane sent no certificate, or no root with it");
        };
        let chain_pem = own.join("\n");
        let identity = Arc::new(request.finish(chain_pem.as_bytes())?);
        Ok(Issued { identity, chain_pem, key_pem: request.key_pem(), roots_pem: root.clone() })
    }

    /// Returns the identity to request. `None` if the trust domain is unknown, because the control plane
    /// refuses a request for an identity other than the caller's.
    fn spiffe_id(&self) -> Option<SpiffeId> {
        let metadata = self.node.metadata.as_ref();
        let text = |key: &str| metadata.and_then(|metadata| text(metadata, key));
        Some(SpiffeId::new(text("TRUST_DOMAIN")?, text("NAMESPACE")?, text("SERVICE_ACCOUNT")?))
    }

    fn request_metadata(&self) -> Struct {
        let cluster = self.node.metadata.as_ref().and_then(|metadata| text(metadata, "CLUSTER_ID"));
        let cluster = istio::string(cluster.unwrap_or("Kubernetes"));
        Struct { fields: [("ClusterID".to_owned(), cluster)].into() }
    }
}

fn text<'a>(metadata: &'a Struct, key: &str) -> Option<&'a str> {
    match &metadata.fields.get(key)?.kind {
        Some(skysail_xds::envoy::pb::google::protobuf::value::Kind::StringValue(text)) => Some(text),
        _ => None,
    }
}

/// Formats an error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

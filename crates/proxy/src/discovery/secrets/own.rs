//! The sidecar's own certificate and the roots that vouch for the control plane.
//!
//! The roots are those of `--ca-root` and those that came with our certificate; while a root is replaced, either may be
//! ahead of the other. `--ca-root` and `--token` are followed: after a change, pauses between attempts to connect end,
//! and new roots have the certificate renewed, because another authority signs from now on.

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

/// The name that the control plane's certificate must have.
pub(crate) const CONTROL_PLANE: &str = "istiod.istio-system.svc";
/// After a change of `--ca-root`, sidecars renew their certificates within this time.
const SPREAD: Duration = Duration::from_secs(5);

/// Where a sidecar of a mesh gets everything from.
#[derive(Clone)]
pub(crate) struct Mesh {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) ca_root: PathBuf,
    pub(crate) token: PathBuf,
    pub(crate) node: PathBuf,
}

/// The sidecar's own certificate, signed by the control plane.
pub(crate) struct OwnCertificate {
    /// The control plane, which is shown our certificate.
    pub(crate) remote: Remote,
    /// The same without our certificate.
    anonymous: Remote,
    node: Node,
    mesh: Mesh,
    roots: Arc<Live<Roots>>,
    /// PEM of the roots that came with our certificate.
    issued_roots: Mutex<String>,
    files: watch::Sender<Files>,
    renewed: watch::Sender<()>,
}

/// A certificate as the control plane issued it, and what goes with it.
pub(crate) struct Issued {
    pub(crate) identity: Arc<Identity>,
    /// The certificates, leaf first, PEM.
    pub(crate) chain_pem: String,
    /// The private key, PEM.
    pub(crate) key_pem: String,
    /// The roots that workloads are to trust, PEM.
    pub(crate) roots_pem: String,
}

/// The content of `--ca-root` and `--token`; of a file that cannot be read, what it held before.
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

/// The headers of a call to the control plane, with the token that the file holds now.
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
    /// Prepares connections to the control plane of a mesh. They show the certificate that `secrets` holds, once there
    /// is one.
    ///
    /// # Errors
    /// When `--ca-root` cannot be used.
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

    /// Gets the first certificate, then renews it for ever; `take` puts each to use.
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
                        // The value locks the channel, so it is dropped before the pause.
                        drop(files.wait_for(|now| now.roots != used.roots).await);
                        sleep(SPREAD.mul_f64(fastrand::f64())).await;
                    };
                    // The spread ends when the renewal is due: a certificate may live for seconds only.
                    tokio::select! {
                        () = renewal.wait(SystemTime::now) => {}
                        () = replaced => {}
                    }
                }
                Err(error) => {
                    failures += 1;
                    let next = renewal::retry(failures, fastrand::f64());
                    let error = format!("{error:#}");
                    tracing::warn!(error, pause = ?next, "no certificate from the control plane");
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

    /// Puts into force the roots of the file and those that came with our certificate.
    fn trust(&self) {
        let issued = self.issued_roots.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let pem = format!("{issued}\n{}", self.files.borrow().roots);
        match Roots::from_pem(pem.as_bytes()) {
            Ok(roots) => self.roots.set(Arc::new(roots)),
            Err(error) => {
                let file = self.mesh.ca_root.display();
                tracing::warn!(%file, %error, "--ca-root cannot be used; the roots before stay in use");
            }
        }
    }

    /// Has a new key certified. After a failure, every other attempt shows no certificate: an authority that was
    /// replaced refuses those of the one before it, while the token is still good.
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
            anyhow::anyhow!("the control plane does not sign: {} ({:?})", status.message(), status.code())
        })?;
        let Some((root, own)) = chain.split_last().filter(|(_, own)| !own.is_empty()) else {
            bail!("the control plane sent no certificate, or no root with it");
        };
        let chain_pem = own.join("\n");
        let identity = Arc::new(request.finish(chain_pem.as_bytes())?);
        Ok(Issued { identity, chain_pem, key_pem: request.key_pem(), roots_pem: root.clone() })
    }

    /// The identity to request; none where the trust domain is not known, as the control plane refuses requests that
    /// name another than the caller.
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

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

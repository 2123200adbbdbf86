//! Certificates and trusted roots: where they come from and when they are renewed.
//!
//! In own mode the sidecar makes its key, has it signed by the control plane, and renews in time; what it gets
//! serves every TLS context that names `default` and `ROOTCA` by SDS from `sds-grpc`, as istiod's all do. With a
//! bootstrap file secrets come from SDS servers, one stream for each secret, as with Envoy, or from [`files`]. Either
//! way the handles in [`TlsContexts`] are filled, which takes effect with the next handshake and interrupts nothing.

mod files;

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, bail};
use arc_swap::ArcSwapOption;
use prost::Message as _;
use skysail_core::SpiffeId;
use skysail_identity::{Identity, KeyAndCsr, Live, PeerCheck, Roots, TlsSpec, renewal};
use skysail_xds::{
    Kind, certificates,
    client::BoxError,
    envoy::pb::{
        envoy::{
            config::core::v3::Node,
            extensions::transport_sockets::tls::v3::Secret,
            service::{
                discovery::v3::{DiscoveryRequest, DiscoveryResponse},
                secret::v3::secret_discovery_service_client::SecretDiscoveryServiceClient,
            },
        },
        google::{protobuf::Struct, rpc::Status as RpcStatus},
    },
    istio::{self, IstioCertificateRequest},
};
use tokio::{
    sync::{Notify, mpsc},
    task::AbortHandle,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::MetadataMap;

use crate::{
    remote::{Remote, RemoteTls},
    translate::{self, SecretName, SecretSource, TlsContexts},
};

/// The cluster that istiod's TLS contexts name for secrets.
const SDS_CLUSTER: &str = "sds-grpc";
/// The name that the control plane's certificate must have.
pub(crate) const CONTROL_PLANE: &str = "istiod.istio-system.svc";

/// Who gets told what about certificates.
#[derive(Clone)]
pub(crate) struct Secrets {
    pub(crate) tls: Arc<TlsContexts>,
    /// The first URI of our certificate.
    pub(crate) principal: Arc<ArcSwapOption<Arc<str>>>,
    /// Notified when a secret came, as clusters and listeners may wait for it.
    pub(crate) changed: Arc<Notify>,
    /// Secrets that a task fetches already.
    fetched: Arc<Mutex<HashSet<SecretName>>>,
    /// Tasks that watch the files of secrets that came from servers.
    watched: Arc<Mutex<HashMap<SecretName, AbortHandle>>>,
}

impl Secrets {
    pub(crate) fn new(tls: Arc<TlsContexts>) -> Self {
        Self {
            tls,
            principal: Arc::default(),
            changed: Arc::default(),
            fetched: Arc::default(),
            watched: Arc::default(),
        }
    }

    /// Takes a secret, and follows the files that it names unless it stands in a bootstrap file.
    pub(crate) fn take(&self, name: &SecretName, secret: &Secret) -> translate::Result<()> {
        self.put(name, secret)?;
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = watched.remove(name) {
            before.abort();
        }
        if name.source != SecretSource::Static && files::names_files(secret) {
            let keep = files::keep(self.clone(), name.clone(), files::Origin::Delivered(secret.clone()));
            watched.insert(name.clone(), tokio::spawn(keep).abort_handle());
        }
        Ok(())
    }

    /// Puts a secret to use.
    fn put(&self, name: &SecretName, secret: &Secret) -> translate::Result<()> {
        let identity = translate::take_secret(&self.tls, name, secret)?;
        self.took(identity)
    }

    /// Takes the sidecar's own certificate, for every context that names the mesh's secrets.
    pub(crate) fn take_own(&self, issued: Issued) -> anyhow::Result<()> {
        let roots = Roots::from_pem(issued.roots_pem.as_bytes())?;
        let (own_name, root_name) = own_names();
        self.tls.identity(&own_name).set(Arc::clone(&issued.identity));
        self.tls.roots(&root_name).set(Arc::new(roots));
        Ok(self.took(Some(issued.identity))?)
    }

    fn took(&self, identity: Option<Arc<Identity>>) -> translate::Result<()> {
        if let Some(uri) = identity.and_then(|identity| identity.peer.uris.first().cloned()) {
            self.principal.store(Some(Arc::new(uri.into())));
        }
        self.tls.refresh()?;
        self.changed.notify_one();
        Ok(())
    }

    /// Starts to follow every file that contexts name for secrets and that is not followed yet.
    pub(crate) fn follow_files(&self) {
        for name in self.tls.names() {
            let SecretSource::File { path, watched } = name.source.clone() else { continue };
            if self.fetched.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
                let origin = files::Origin::File { path, watched, found: None };
                tokio::spawn(files::keep(self.clone(), name, origin));
            }
        }
    }

    /// Starts to fetch every secret that contexts name from SDS servers and that is not fetched yet. `remote` finds
    /// the server behind a cluster.
    pub(crate) fn fetch(&self, node: &Node, remote: impl Fn(&str) -> Option<Remote>) {
        for name in self.tls.names() {
            let SecretSource::Cluster(cluster) = &name.source else { continue };
            let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
            if fetched.contains(&name) {
                continue;
            }
            let Some(remote) = remote(cluster) else {
                tracing::warn!(secret = %name.name, %cluster, "there is no cluster of this name to get the secret from");
                fetched.insert(name);
                continue;
            };
            fetched.insert(name.clone());
            let (secrets, node) = (self.clone(), node.clone());
            tokio::spawn(async move { secrets.follow(&name, &node, &remote).await });
        }
    }

    /// Keeps one secret up to date.
    async fn follow(&self, name: &SecretName, node: &Node, remote: &Remote) -> Infallible {
        let mut failures = 0;
        let mut version = String::new();
        loop {
            let Err(error) = self.stream(name, node, remote, &mut version, &mut failures).await;
            failures += 1;
            let pause = renewal::retry(failures, fastrand::f64());
            tracing::warn!(secret = %name.name, %error, ?pause, "no secret discovery; what there is stays in use");
            tokio::time::sleep(pause).await;
        }
    }

    async fn stream(
        &self,
        name: &SecretName,
        node: &Node,
        remote: &Remote,
        version: &mut String,
        failures: &mut u32,
    ) -> Result<Infallible, BoxError> {
        let mut client = SecretDiscoveryServiceClient::new(remote.connect().await?);
        let (sender, requests) = mpsc::unbounded_channel();
        let first = DiscoveryRequest {
            node: Some(node.clone()),
            version_info: version.clone(),
            resource_names: vec![name.name.to_string()],
            type_url: Kind::Secret.url().to_owned(),
            ..DiscoveryRequest::default()
        };
        sender.send(first.clone())?;
        let mut responses = client.stream_secrets(UnboundedReceiverStream::new(requests)).await?.into_inner();
        while let Some(response) = responses.message().await? {
            *failures = 0;
            let outcome = self.response(name, &response);
            let error_detail = outcome.err().map(|message| {
                tracing::warn!(secret = %name.name, reason = message, "secret rejected; the one before it stays in use");
                RpcStatus { code: tonic::Code::InvalidArgument.into(), message, details: Vec::new() }
            });
            if error_detail.is_none() {
                *version = response.version_info;
            }
            let answer = DiscoveryRequest {
                node: None,
                version_info: version.clone(),
                response_nonce: response.nonce,
                error_detail,
                ..first.clone()
            };
            sender.send(answer)?;
        }
        Err("the server closed the stream".into())
    }

    fn response(&self, name: &SecretName, response: &DiscoveryResponse) -> Result<(), String> {
        for any in &response.resources {
            let secret = Secret::decode(any.value.as_slice()).map_err(|error| error.to_string())?;
            if *secret.name == *name.name {
                self.take(name, &secret).map_err(|reject| reject.to_string())?;
            }
        }
        Ok(())
    }
}

/// The sidecar's own certificate, signed by the control plane.
pub(crate) struct OwnCertificate {
    pub(crate) node: Node,
    /// The control plane.
    pub(crate) remote: Remote,
    /// PEM file of roots that the control plane's certificate is checked against.
    pub(crate) ca_root: PathBuf,
    /// The roots it is checked against: those of the file, and those that came with our certificate.
    pub(crate) trust: Arc<Live<Roots>>,
    /// The service account token, read anew for each attempt.
    pub(crate) token: PathBuf,
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

/// The handles of our certificate and of the roots of the mesh.
fn own_names() -> (SecretName, SecretName) {
    let name =
        |name: &str| SecretName { source: SecretSource::Cluster(SDS_CLUSTER.into()), name: name.into() };
    (name("default"), name("ROOTCA"))
}

/// TLS to the control plane: checked against the name and against roots, at first those of the root file; with our
/// certificate once there is one.
pub(crate) fn control_plane_tls(
    tls: &TlsContexts,
    ca_root: &std::path::Path,
) -> anyhow::Result<(RemoteTls, Arc<Live<Roots>>)> {
    let pem =
        std::fs::read(ca_root).with_context(|| format!("cannot read --ca-root {}", ca_root.display()))?;
    let roots = Roots::from_pem(&pem).with_context(|| format!("--ca-root {}", ca_root.display()))?;
    let roots = Live::new(roots);
    let spec = TlsSpec {
        identities: vec![tls.identity(&own_names().0)],
        peer: Some(PeerCheck {
            roots: Arc::clone(&roots),
            names: Vec::new(),
            host_name: true,
            required: true,
        }),
        alpn: vec![b"h2".to_vec()],
        ..TlsSpec::default()
    };
    Ok((RemoteTls::Fixed(spec.client()?, CONTROL_PLANE.try_into()?), roots))
}

/// The headers of a call to the control plane: the token as it is now.
pub(crate) fn authorization(token: &std::path::Path) -> anyhow::Result<MetadataMap> {
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
    /// Gets the first certificate, then renews it for ever; `take` puts each to use.
    pub(crate) async fn keep(self, mut take: impl FnMut(Issued) -> anyhow::Result<()>) -> Infallible {
        let mut failures = 0;
        let mut told = String::new();
        loop {
            // The file may have been replaced.
            self.trust(&told);
            let obtained = self.obtain().await.and_then(|issued| {
                told.clone_from(&issued.roots_pem);
                self.trust(&told);
                let identity = Arc::clone(&issued.identity);
                take(issued)?;
                Ok(identity)
            });
            let pause = match obtained {
                Ok(identity) => {
                    failures = 0;
                    let pause = identity.renewal_due();
                    tracing::info!(principal = ?identity.peer.uris, next = ?pause, "certificate obtained");
                    pause
                }
                Err(error) => {
                    failures += 1;
                    let pause = renewal::retry(failures, fastrand::f64());
                    let error = format!("{error:#}");
                    tracing::warn!(error, ?pause, "no certificate from the control plane");
                    pause
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    async fn obtain(&self) -> anyhow::Result<Issued> {
        let id = self.spiffe_id();
        let request = KeyAndCsr::generate(id.as_ref())?;
        let metadata = authorization(&self.token)?;
        let channel = self.remote.connect().await.map_err(|error| anyhow::anyhow!(chain(&*error)))?;
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

    /// Trusts the control plane by these roots and those of the file, which may each be ahead of the other while a root
    /// is replaced.
    fn trust(&self, told: &str) {
        let file = std::fs::read_to_string(&self.ca_root).unwrap_or_default();
        match Roots::from_pem(format!("{told}\n{file}").as_bytes()) {
            Ok(roots) => self.trust.set(Arc::new(roots)),
            Err(error) => {
                let file = self.ca_root.display();
                tracing::warn!(%file, %error, "--ca-root cannot be used; the roots before stay in use");
            }
        }
    }

    /// Whom the request names; nobody where the trust domain is not known, as the control plane refuses requests that
    /// name somebody else.
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

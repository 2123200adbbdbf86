//! Certificates and trusted roots: their sources and their renewal.
//!
//! In a mesh the sidecar generates a key, has the control plane sign its certificate, and renews it in time.
//! The result serves every TLS context that names `default` and `ROOTCA` by SDS from `sds-grpc`, as all of
//! istiod's do. With a bootstrap file, secrets come from SDS servers, one stream per secret as in Envoy, or
//! from [`files`]. Either way the handles in [`TlsContexts`] are filled. A change takes effect with the next
//! handshake and interrupts no connection.

mod files;
mod own;
mod watch;

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use skysail_identity::{Identity, Roots, renewal};
use skysail_xds::{
    Kind,
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
        google::rpc::Status as RpcStatus,
    },
};
use tokio::{
    sync::{Notify, mpsc, watch as channel},
    task::AbortHandle,
};
use tokio_stream::wrappers::UnboundedReceiverStream;

pub(crate) use self::files::of_agent as secret_of_files;
pub(crate) use self::own::{CONTROL_PLANE, Issued, Mesh, OwnCertificate, authorization};
use crate::{
    discovery::remote::Remote,
    translate::{self, SecretName, SecretSource, TlsContexts, Translator},
};

/// Cluster that istiod's TLS contexts name for SDS.
const SDS_CLUSTER: &str = "sds-grpc";
/// Minimum pause between connection attempts, also after certificates, roots or tokens have changed.
const MIN_PAUSE: Duration = Duration::from_millis(250);

/// Store of certificates and trusted roots, with notifications of changes.
#[derive(Clone)]
pub(crate) struct Secrets {
    pub(crate) tls: Arc<TlsContexts>,
    /// First URI SAN of the sidecar's own certificate.
    pub(crate) principal: Arc<ArcSwapOption<Arc<str>>>,
    /// Notified when a secret has arrived, because clusters and listeners may wait for it.
    pub(crate) changed: Arc<Notify>,
    /// Notified when a certificate, a root or a token has changed, so that a failed connection is retried at
    /// once.
    pub(crate) renewed: channel::Sender<()>,
    /// Secrets that a task already fetches.
    fetched: Arc<Mutex<HashSet<SecretName>>>,
    /// Tasks that watch the files of secrets from SDS servers.
    watched: Arc<Mutex<HashMap<SecretName, AbortHandle>>>,
}

impl Secrets {
    pub(crate) fn new(tls: Arc<TlsContexts>) -> Self {
        Self {
            tls,
            principal: Arc::default(),
            changed: Arc::default(),
            renewed: channel::Sender::new(()),
            fetched: Arc::default(),
            watched: Arc::default(),
        }
    }

    /// Decodes a secret from a server and checks all its fields.
    pub(crate) fn decode(&self, body: &[u8]) -> translate::Result<Secret> {
        Translator { tls: &self.tls, node: &Node::default(), strict: false }.decode(body)
    }

    /// Stores a secret and makes the contexts usable that waited for it.
    pub(crate) fn store(&self, name: &SecretName, secret: &Secret) -> translate::Result<()> {
        self.put(name, secret)?;
        self.notify()
    }

    /// Stores a secret without [`Self::notify`]. Watches the files that it names, unless the secret is part of a
    /// bootstrap file.
    pub(crate) fn put(&self, name: &SecretName, secret: &Secret) -> translate::Result<()> {
        self.fill(name, secret)?;
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = watched.remove(name) {
            before.abort();
        }
        if name.source != SecretSource::Static && files::names_files(secret) {
            let keep =
                files::follow(self.clone(), name.clone(), files::FileOrigin::Delivered(secret.clone()));
            watched.insert(name.clone(), tokio::spawn(keep).abort_handle());
        }
        Ok(())
    }

    /// Stores a secret in its handle.
    fn fill(&self, name: &SecretName, secret: &Secret) -> translate::Result<()> {
        let identity = translate::store_secret(&self.tls, name, secret)?;
        self.set_principal(identity);
        Ok(())
    }

    /// Stores the sidecar's own certificate, for every context that names the mesh's secrets.
    pub(crate) fn store_own(&self, issued: Issued) -> anyhow::Result<()> {
        let roots = Roots::from_pem(issued.roots_pem.as_bytes())?;
        let (own_name, root_name) = own_names();
        self.tls.identity(&own_name).set(Arc::clone(&issued.identity));
        self.tls.set_roots(&root_name, roots);
        self.set_principal(Some(issued.identity));
        Ok(self.notify()?)
    }

    fn set_principal(&self, identity: Option<Arc<Identity>>) {
        if let Some(uri) = identity.and_then(|identity| identity.peer.uris.first().cloned()) {
            self.principal.store(Some(Arc::new(uri.into())));
        }
    }

    /// Makes contexts usable whose secrets have all arrived, and notifies those who wait for secrets.
    pub(crate) fn notify(&self) -> translate::Result<()> {
        let result = self.tls.refresh();
        self.changed.notify_one();
        self.renewed.send_replace(());
        result
    }

    /// Starts to watch every file that contexts name for secrets and that is not watched yet. In a mesh these include
    /// the files that contexts name to `sds-grpc`, since the sidecar has no agent beside it.
    pub(crate) fn follow_files(&self, in_mesh: bool) {
        for name in self.tls.names() {
            let origin = match name.source.clone() {
                SecretSource::File { path, watched } => {
                    files::FileOrigin::File { path, watched, found: None }
                }
                SecretSource::CrlFile { path, watched } => files::FileOrigin::crl(&path, watched),
                SecretSource::Cluster(cluster) if in_mesh && *cluster == *SDS_CLUSTER => {
                    let Some(secret) = files::of_agent(&name.name) else { continue };
                    files::FileOrigin::Delivered(secret)
                }
                SecretSource::Ads | SecretSource::Cluster(_) | SecretSource::Static => continue,
            };
            if self.fetched.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone()) {
                tokio::spawn(files::follow(self.clone(), name, origin));
            }
        }
    }

    /// Starts to fetch every secret that contexts name from SDS servers and that is not fetched yet. `remote`
    /// returns the server behind a cluster.
    pub(crate) fn fetch(&self, node: &Node, remote: impl Fn(&str) -> Option<Remote>) {
        for name in self.tls.names() {
            let SecretSource::Cluster(cluster) = &name.source else { continue };
            let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
            if fetched.contains(&name) {
                continue;
            }
            let Some(remote) = remote(cluster) else {
                tracing::warn!(secret = %name.name, %cluster, "there is no such cluster to fetch the secret from");
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
        let mut renewed = self.renewed.subscribe();
        loop {
            renewed.mark_unchanged();
            let Err(error) = self.stream(name, node, remote, &mut version, &mut failures).await;
            failures += 1;
            let next = renewal::retry(failures, fastrand::f64());
            tracing::warn!(secret = %name.name, %error, pause = ?next, "secret discovery failed; the current secret stays in use");
            pause(next, renewed.changed()).await;
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
                tracing::warn!(secret = %name.name, reason = message, "secret rejected; the previous one stays in use");
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
            let secret = self.decode(&any.value).map_err(|reject| reject.to_string())?;
            if *secret.name == *name.name {
                self.store(name, &secret).map_err(|reject| reject.to_string())?;
            }
        }
        Ok(())
    }
}

/// Returns the names of the sidecar's own certificate and of the mesh's roots.
fn own_names() -> (SecretName, SecretName) {
    let name =
        |name: &str| SecretName { source: SecretSource::Cluster(SDS_CLUSTER.into()), name: name.into() };
    (name("default"), name("ROOTCA"))
}

/// Waits before the next connection attempt. Ends early when a certificate, root or token has changed.
async fn pause(full: Duration, renewed: impl Future<Output = impl Sized>) {
    let min = full.min(MIN_PAUSE);
    tokio::time::sleep(min).await;
    let _ = tokio::time::timeout(full - min, renewed).await;
}

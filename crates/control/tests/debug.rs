//! Istio's debug types, requested as by `istioctl`: one state-of-the-world request of a client whose node id is that of
//! a sidecar in another namespace than its metadata.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may end the test"
)]

mod support;

use std::time::Duration;

use serde_json::Value;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            admin::v3::{ClustersConfigDump, ListenersConfigDump, RoutesConfigDump},
            config::{cluster::v3::Cluster, core::v3::Node},
            service::{
                discovery::v3::{
                    DiscoveryRequest, DiscoveryResponse,
                    aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
                },
                status::v3::{ClientConfig, ConfigStatus},
            },
        },
        google::protobuf::{Any, value},
    },
    istio::{string, structure},
};
use support::{Folder, bearer, connect};
use tokio_stream::StreamExt as _;
use tonic::{Code, Request, Status, Streaming, metadata::MetadataMap, transport::Channel};

const PROXY: &str = "sidecar~10.0.0.1~client-1.default~default.svc.cluster.local";
const SYNCZ: &str = "istio.io/debug/syncz";
const DUMP: &str = "istio.io/debug/config_dump";
const PAGE: &str = "istio.io/debug";

fn node(id: &str, fields: &[(&str, &str)]) -> Node {
    let metadata = match structure(fields.iter().map(|(name, text)| (*name, string(*text)))).kind {
        Some(value::Kind::StructValue(fields)) => Some(fields),
        _ => None,
    };
    Node { id: id.into(), metadata, ..Node::default() }
}

/// The node that `istioctl` declares for every user.
fn istioctl() -> Node {
    let fields = [
        ("GENERATOR", "event"),
        ("NAMESPACE", "istio-system"),
        ("SERVICE_ACCOUNT", "default"),
        ("ISTIO_VERSION", "65536.65536.65536"),
    ];
    node("sidecar~10.0.0.9~test-1.default~default.svc.cluster.local", &fields)
}

async fn open(
    channel: Channel,
    metadata: MetadataMap,
    requests: impl tokio_stream::Stream<Item = DiscoveryRequest> + Send + 'static,
) -> Result<Streaming<DiscoveryResponse>, Status> {
    let mut call = Request::new(requests);
    *call.metadata_mut() = metadata;
    let mut client = AggregatedDiscoveryServiceClient::new(channel);
    Ok(client.stream_aggregated_resources(call).await?.into_inner())
}

fn request(type_url: &str, names: &[&str]) -> DiscoveryRequest {
    DiscoveryRequest {
        node: Some(istioctl()),
        type_url: type_url.into(),
        resource_names: names.iter().map(|name| (*name).into()).collect(),
        // `istioctl` sends the time as nonce.
        response_nonce: "2026-08-27 12:45:20.1 +0000 UTC m=+0.1".into(),
        ..DiscoveryRequest::default()
    }
}

/// Requests a debug type once.
async fn ask(
    channel: &Channel,
    metadata: MetadataMap,
    type_url: &str,
    names: &[&str],
) -> Result<DiscoveryResponse, Status> {
    let requests = tokio_stream::once(request(type_url, names)).chain(tokio_stream::pending());
    let mut responses = open(channel.clone(), metadata, requests).await?;
    let response = responses.message().await?.expect("a response");
    assert_eq!(response.type_url, type_url);
    Ok(response)
}

fn read<M: prost::Message + Default>(any: &Any) -> M {
    M::decode(any.value.as_slice()).unwrap()
}

/// A connected sidecar that has accepted its clusters.
struct Sidecar {
    _requests: tokio::sync::mpsc::UnboundedSender<DiscoveryRequest>,
    _responses: Streaming<DiscoveryResponse>,
}

async fn sidecar(channel: &Channel, folder: &Folder) -> Sidecar {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    let fields = [("SERVICE_ACCOUNT", "client"), ("NAMESPACE", "default"), ("ISTIO_VERSION", "1.32.0")];
    let first = DiscoveryRequest {
        node: Some(node(PROXY, &fields)),
        type_url: Kind::Cluster.url().into(),
        ..DiscoveryRequest::default()
    };
    sender.send(first.clone()).unwrap();
    let requests = tokio_stream::wrappers::UnboundedReceiverStream::new(receiver);
    let mut responses = open(channel.clone(), bearer(&folder.token("client")), requests).await.unwrap();
    let response = responses.message().await.unwrap().unwrap();
    let DiscoveryResponse { version_info, nonce: response_nonce, .. } = response;
    sender.send(DiscoveryRequest { version_info, response_nonce, ..first }).unwrap();
    Sidecar { _requests: sender, _responses: responses }
}

/// Returns the status of the one sidecar after it has accepted all responses.
async fn synced(channel: &Channel, metadata: &MetadataMap) -> ClientConfig {
    let all = async {
        loop {
            let response = ask(channel, metadata.clone(), SYNCZ, &[]).await.unwrap();
            let [resource] = &response.resources[..] else { panic!("{response:?}") };
            assert_eq!(resource.type_url, "type.googleapis.com/envoy.service.status.v3.ClientConfig");
            let config: ClientConfig = read(resource);
            if config.generic_xds_configs[0].config_status == i32::from(ConfigStatus::Synced) {
                let by: Value = serde_json::from_str(&response.control_plane.unwrap().identifier).unwrap();
                assert!(
                    by["Component"].is_string() && by["ID"].is_string() && by["Info"]["version"].is_string()
                );
                return config;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.unwrap()
}

#[tokio::test]
async fn administrators_see_proxies_and_their_configuration() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start("0").await;
    let channel = connect(&control, &folder).await;
    let _sidecar = sidecar(&channel, &folder).await;
    // The default service account of `istioctl`.
    let token = bearer(&folder.token_of("istio-system", "default"));

    let config = synced(&channel, &token).await;
    let seen = config.node.unwrap();
    assert_eq!(seen.id, PROXY, "debug requests do not count as proxies");
    let metadata = seen.metadata.unwrap().fields;
    let text = |name: &str| match &metadata[name].kind {
        Some(value::Kind::StringValue(text)) => text.clone(),
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(
        [text("NAMESPACE"), text("CLUSTER_ID"), text("ISTIO_VERSION")],
        ["default", "Kubernetes", "1.32.0"]
    );
    let clusters = &config.generic_xds_configs[0];
    assert_eq!(clusters.type_url, Kind::Cluster.url());
    assert!(
        clusters.last_updated.as_ref().unwrap().seconds > 1_700_000_000 && clusters.error_state.is_none()
    );

    let with_query = format!("{DUMP}?proxyID=client-1.default");
    for (type_url, names) in [(DUMP, &["client-1.default"][..]), (DUMP, &[PROXY]), (with_query.as_str(), &[])]
    {
        let dump = ask(&channel, token.clone(), type_url, names).await.unwrap().resources;
        let part = |name: &str| dump.iter().find(|part| part.type_url.ends_with(name)).unwrap();
        let clusters: ClustersConfigDump = read(part(".ClustersConfigDump"));
        let names = clusters.dynamic_active_clusters.iter().map(|cluster| {
            let cluster: Cluster = read(cluster.cluster.as_ref().unwrap());
            cluster.name
        });
        assert!(names.into_iter().any(|name| name == "outbound|80||reviews.default.svc.cluster.local"));
        let listeners: ListenersConfigDump = read(part(".ListenersConfigDump"));
        assert!(listeners.dynamic_listeners.iter().any(|listener| listener.name == "virtualInbound"));
        let routes: RoutesConfigDump = read(part(".RoutesConfigDump"));
        assert!(!routes.dynamic_route_configs.is_empty());
        assert!(dump.iter().all(|part| !part.type_url.contains("Secret")));
    }
    let unknown = ask(&channel, token.clone(), DUMP, &["nobody.default"]).await.unwrap_err();
    assert!(unknown.code() == Code::NotFound && unknown.message().contains("nobody.default"), "{unknown}");

    let connections = ask(&channel, token.clone(), "istio.io/connections", &[]).await.unwrap();
    assert_eq!(read::<Node>(&connections.resources[0]).id, PROXY);
    let page = async |name: &str| {
        let response = ask(&channel, token.clone(), PAGE, &[name]).await.unwrap();
        String::from_utf8(response.resources[0].value.clone()).unwrap()
    };
    assert!(page("list").await.contains("\"syncz\""));
    assert!(page("syncz").await.contains("spiffe://cluster.local/ns/default/sa/client"));
    assert!(page("connections").await.contains("\"totalClients\":1"));
    assert_eq!(page("nothing").await, "404 page not found");
    let metrics = control.page("/metrics").await;
    assert!(metrics.contains("pilot_xds{version=") && metrics.contains("} 1\n"), "{metrics}");
}

#[tokio::test]
async fn debug_types_require_authorization_and_sidecars_are_still_checked() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start_with("0", &["--admin-allow", "default/kiali"]).await;
    let channel = connect(&control, &folder).await;
    let _sidecar = sidecar(&channel, &folder).await;
    synced(&channel, &bearer(&folder.token("kiali"))).await;

    for (type_url, names) in
        [(SYNCZ, &[][..]), (DUMP, &["client-1.default"]), ("istio.io/connections", &[]), (PAGE, &["ca"])]
    {
        // Neither the proxy in question nor another service account of the root namespace.
        for token in [folder.token("client"), folder.token_of("istio-system", "gateway")] {
            let refused = ask(&channel, bearer(&token), type_url, names).await.unwrap_err();
            assert_eq!(refused.code(), Code::PermissionDenied, "{type_url}: {refused}");
            assert!(refused.message().contains("--admin-allow"), "{refused}");
        }
        for metadata in [MetadataMap::new(), bearer(&Folder::new().token("kiali"))] {
            let refused = ask(&channel, metadata, type_url, names).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated, "{type_url}: {refused}");
        }
    }
    // The same node cannot subscribe to clusters: its id and metadata are inconsistent.
    let kiali = bearer(&folder.token("kiali"));
    let refused = ask(&channel, kiali.clone(), Kind::Cluster.url(), &[]).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");

    // A stream of debug requests accepts no subscription, and a limited number of requests.
    let mixed = [request(SYNCZ, &[]), request(Kind::Cluster.url(), &[])];
    let mut responses = open(channel.clone(), kiali.clone(), tokio_stream::iter(mixed)).await.unwrap();
    assert!(responses.message().await.unwrap().is_some());
    assert_eq!(responses.message().await.unwrap_err().code(), Code::InvalidArgument);
    let allowed = tokio_stream::iter(std::iter::repeat_n(request(SYNCZ, &[]), 16));
    let mut responses = open(channel.clone(), kiali.clone(), allowed).await.unwrap();
    for _ in 0..16 {
        assert!(responses.message().await.unwrap().is_some());
    }
    assert!(responses.message().await.unwrap().is_none());
    let many = tokio_stream::iter(std::iter::repeat_n(request(SYNCZ, &[]), 100));
    let mut responses = open(channel, kiali, many).await.unwrap();
    let mut answered = 0;
    let ended = loop {
        match responses.message().await {
            Ok(Some(_)) => answered += 1,
            Ok(None) => panic!("the stream ended without a status"),
            Err(status) => break status,
        }
    };
    assert_eq!((answered, ended.code()), (16, Code::ResourceExhausted), "{ended}");
}

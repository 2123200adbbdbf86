//! The status of objects, by what a proxy was sent and what it answered.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests may end the test"
)]

mod support;

use std::{fs, time::Duration};

use serde_json::Value;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            config::core::v3::Node,
            service::discovery::v3::{
                DeltaDiscoveryRequest, DeltaDiscoveryResponse,
                aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
            },
        },
        google::{protobuf::value, rpc::Status as ErrorDetail},
    },
    istio::{string, structure},
};
use support::{Control, Folder, bearer, connect};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Streaming, transport::Channel};

const PROXY: &str = "sidecar~10.0.0.1~client-1.default~default.svc.cluster.local";
const CLUSTER: &str = "outbound|80||reviews.default.svc.cluster.local";

/// A sidecar that answers responses as the test says.
struct Sidecar {
    requests: UnboundedSender<DeltaDiscoveryRequest>,
    responses: Streaming<DeltaDiscoveryResponse>,
}

impl Sidecar {
    async fn connect(channel: &Channel, folder: &Folder) -> Self {
        let (requests, receiver) = unbounded_channel();
        let fields = [("SERVICE_ACCOUNT", string("client"))];
        let metadata = match structure(fields).kind {
            Some(value::Kind::StructValue(fields)) => Some(fields),
            _ => None,
        };
        let node = Some(Node { id: PROXY.into(), metadata, ..Node::default() });
        requests.send(DeltaDiscoveryRequest { node, ..request(Kind::Cluster, &[]) }).unwrap();
        let mut call = Request::new(UnboundedReceiverStream::new(receiver));
        *call.metadata_mut() = bearer(&folder.token("client"));
        let mut client = AggregatedDiscoveryServiceClient::new(channel.clone());
        let responses = client.delta_aggregated_resources(call).await.unwrap().into_inner();
        Self { requests, responses }
    }

    /// Returns the nonce of the next response, and the names of its resources.
    async fn response(&mut self) -> (String, Vec<String>) {
        let response = self.responses.message().await.unwrap().unwrap();
        (response.nonce, response.resources.into_iter().map(|resource| resource.name).collect())
    }

    fn answer(&self, nonce: String, error: Option<&str>) {
        let error_detail =
            error.map(|message| ErrorDetail { code: 13, message: message.into(), ..ErrorDetail::default() });
        let answer =
            DeltaDiscoveryRequest { response_nonce: nonce, error_detail, ..request(Kind::Cluster, &[]) };
        self.requests.send(answer).unwrap();
    }
}

fn request(kind: Kind, names: &[&str]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: kind.url().into(),
        resource_names_subscribe: names.iter().map(|name| (*name).into()).collect(),
        ..DeltaDiscoveryRequest::default()
    }
}

async fn object(control: &Control, object: &str) -> Value {
    serde_json::from_str(&control.page(&format!("/debug/objects/{object}")).await).unwrap()
}

/// Waits until an object has a state.
async fn wait(control: &Control, path: &str, state: &str) -> Value {
    let seen = async {
        loop {
            let (status, body) = control.ask("GET", &format!("/debug/objects/{path}")).await;
            let page: Value = serde_json::from_str(&body).unwrap_or_default();
            if status == 200 && page["state"] == state {
                return page;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), seen)
        .await
        .unwrap_or_else(|_| panic!("{path} is never {state}"))
}

fn rule(folder: &Folder, timeout: &str) {
    let text = format!(
        "apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: reviews, namespace: default}}\n\
         spec: {{host: reviews, trafficPolicy: {{connectionPool: {{tcp: {{connectTimeout: {timeout}}}}}}}}}\n"
    );
    fs::write(folder.at("config").join("rule.yaml"), text).unwrap();
}

#[tokio::test]
async fn objects_are_pending_accepted_or_refused_by_the_answers_of_proxies() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    folder.service("ratings", 2);
    let control = folder.start("0").await;
    let page = object(&control, "service/default/reviews").await;
    assert_eq!(
        (&page["state"], &page["deliveries"]),
        (&"unused".into(), &Value::Array(Vec::new())),
        "{page}"
    );
    assert_eq!(control.ask("GET", "/debug/objects/service/default/none").await.0, 404);

    let channel = connect(&control, &folder).await;
    let mut sidecar = Sidecar::connect(&channel, &folder).await;
    let (nonce, names) = sidecar.response().await;
    assert!(names.iter().any(|name| name == CLUSTER), "{names:?}");
    let page = wait(&control, "service/default/reviews", "pending").await;
    assert_eq!((&page["sent"], &page["deliveries"][0]["state"]), (&1.into(), &"sent".into()), "{page}");
    sidecar.answer(nonce, None);
    let page = wait(&control, "Service/default/reviews", "in_effect").await;
    assert_eq!(
        (&page["acknowledged"], &page["deliveries"][0]["proxy"]),
        (&1.into(), &PROXY.into()),
        "{page}"
    );
    let resources = serde_json::json!([{"type": "cds", "name": CLUSTER}]);
    assert_eq!((&page["resources"], &page["resources_omitted"]), (&resources, &0.into()), "{page}");
    let file = page["file"].as_str().unwrap();
    assert!(file.ends_with("reviews.yaml") && page["line"] == 1 && page["fingerprint"].is_u64(), "{page}");

    // The proxy rejects what one object makes of a cluster; the others stay in effect.
    rule(&folder, "3s");
    let (nonce, names) = sidecar.response().await;
    assert_eq!(names, [CLUSTER]);
    sidecar.answer(nonce, Some(&format!("Error adding/updating cluster(s) {CLUSTER}: wrong")));
    let page = wait(&control, "destinationrule/default/reviews", "refused").await;
    let error = page["deliveries"][0]["error"].as_str().unwrap();
    assert!(page["refused"] == 1 && error.contains("wrong"), "{page}");
    wait(&control, "service/default/ratings", "in_effect").await;
    // Also after the proxy has accepted something else.
    folder.service("details", 3);
    let (nonce, names) = sidecar.response().await;
    assert_eq!(names, ["outbound|80||details.default.svc.cluster.local"]);
    sidecar.answer(nonce, None);
    wait(&control, "service/default/details", "in_effect").await;
    let page = object(&control, "destinationrule.networking.istio.io/default/reviews").await;
    assert_eq!(page["state"], "refused", "{page}");

    rule(&folder, "4s");
    let (nonce, _) = sidecar.response().await;
    sidecar.answer(nonce, None);
    wait(&control, "destinationrule/default/reviews", "in_effect").await;

    // The control plane refuses an object: its last valid version stays in effect.
    rule(&folder, "wrong");
    let page = wait(&control, "destinationrule/default/reviews", "invalid").await;
    assert_eq!(page["acknowledged"], 1, "{page}");
    let mut errors = page["findings"].as_array().unwrap().iter().filter(|found| found["severity"] == "error");
    assert!(errors.next().unwrap()["field"].as_str().unwrap().contains("connectTimeout"), "{page}");
    assert!(errors.next().is_none() && page["errors"] == 1, "{page}");

    let all: Value = serde_json::from_str(&control.page("/debug/objects").await).unwrap();
    let listed: Vec<String> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            format!("{} {} {} {}", one["kind"], one["name"], one["state"], one["proxies"]).replace('"', "")
        })
        .collect();
    let expected = [
        "Service details in_effect 1",
        "Service ratings in_effect 1",
        "Service reviews in_effect 1",
        "DestinationRule reviews invalid 1",
    ];
    assert_eq!(listed, expected);
}

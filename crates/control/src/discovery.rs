//! Admits proxies to discovery.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use serde_json::{Map, Number, Value};
use skysail_core::logging::Throttle;
use skysail_identity::BoundPod;
use skysail_model::{MAX_ID, ProxyNode, api::kube::Locality};
use skysail_xds::{
    client::Form,
    envoy::pb::{
        envoy::{config::core::v3::Node, service::discovery::v3::DiscoveryResponse},
        google::protobuf::{Struct, Value as ProtoValue, value},
    },
    grpc::address,
    server::{Ended, Event, Question, View, Views},
};
use tonic::{Code, Request, Status};
use tracing::info;

use crate::{
    access::Access,
    admin::Pages,
    audit::{Audit, Event as Audited, Text},
    authentication::{Authentication, Caller, Proof, caller, socket},
    debug,
    habits::Habits,
    metrics::count,
    platform::PodOf,
    publish::{NewClient, Publisher, Refused},
};

/// The discovery service's side of the mesh.
pub(crate) struct Discovery {
    publisher: Arc<Publisher>,
    authentication: Arc<Authentication>,
    habits: Arc<Habits>,
    pages: Arc<Pages>,
    access: Arc<Access>,
    audit: Arc<Audit>,
    /// The cluster of proxies that do not name theirs.
    cluster_id: String,
    /// Lines about refused streams, and about refused debug types.
    said: [Throttle; 2],
}

impl Discovery {
    pub(crate) fn new(
        authentication: Arc<Authentication>,
        pages: Arc<Pages>,
        access: Arc<Access>,
        audit: Arc<Audit>,
        cluster_id: String,
    ) -> Self {
        let (publisher, habits) = (Arc::clone(&pages.publisher), Arc::clone(&pages.habits));
        let said = [const { Throttle::new(Duration::from_secs(1)) }; 2];
        Self { publisher, authentication, habits, pages, access, audit, cluster_id, said }
    }

    /// Determines the caller, the node that it declares, and the end of its access.
    fn admit(&self, node: Node, form: Form, call: &Request<()>) -> Result<(NewClient, Ended), Status> {
        let version = version(&node);
        let node = self.read(node).map_err(Status::invalid_argument)?;
        let proof = match caller(call.extensions())? {
            Caller::Anyone => None,
            Caller::Proven(proof) => Some(proof),
        };
        if let Some(proof) = &proof {
            authorize(&node, proof)?;
        }
        let identity = proof.as_ref().map(|proof| proof.id.to_string()).unwrap_or_default();
        let pod = BoundPod { name: node.pod.clone(), uid: String::new() };
        let declared = PodOf { namespace: node.view.namespace.clone(), pod };
        let from = socket(call.extensions()).as_ref().map(SocketAddr::ip);
        let ended: Ended = Box::pin(self.authentication.end(proof.as_deref(), from, declared));
        // What nobody proved does not mix with what somebody did.
        let who: Arc<str> = match identity.as_str() {
            "" => format!("{}/{}", node.view.namespace, node.view.service_account).into(),
            proven => proven.into(),
        };
        let address = address(call.extensions());
        Ok((NewClient { node, version, address, identity, who, form }, ended))
    }

    async fn enter(&self, client: NewClient, ended: Ended) -> Result<View, Status> {
        let who = Arc::clone(&client.who);
        let entered = self.publisher.connect(client).await;
        let (resources, connected) = entered.map_err(|refused| {
            let reason = refused.reason(&self.publisher.settings);
            match refused {
                Refused::Closed => Status::unavailable(reason),
                Refused::OtherAccount(_) => Status::permission_denied(reason),
                Refused::Limit(_) => Status::resource_exhausted(reason),
                Refused::Broken(_) => Status::internal(reason),
            }
        })?;
        let habits = Arc::clone(&self.habits);
        let remembered = habits.of(&who, &resources.snapshot.borrow().clone());
        let identity = Arc::clone(&who);
        let report = move |event: Event<'_>| match event {
            Event::Used { host } => habits.used(&who, host),
            Event::Unused { host } => habits.unused(&who, host),
            event => connected.report(event),
        };
        Ok(View { identity, resources, report: Box::new(report), remembered, ended })
    }

    fn read(&self, node: Node) -> Result<ProxyNode, String> {
        let mut metadata = node.metadata.map(object).unwrap_or_default();
        metadata.entry("CLUSTER_ID").or_insert_with(|| self.cluster_id.clone().into());
        let locality = node.locality.map(|locality| Locality {
            region: locality.region,
            zone: locality.zone,
            subzone: locality.sub_zone,
        });
        ProxyNode::parse(&node.id, metadata.into(), locality.unwrap_or_default())
            .map_err(|error| error.to_string())
    }
}

impl Views for Discovery {
    async fn connect(&self, node: Node, form: Form, call: Request<()>) -> Result<View, Status> {
        let id = node.id[..node.id.floor_char_boundary(MAX_ID)].to_owned();
        let address = address(call.extensions());
        let entered = match self.admit(node, form, &call) {
            Ok((client, ended)) => self.enter(client, ended).await,
            Err(refused) => Err(refused),
        };
        entered.inspect_err(|status| {
            count(&self.publisher.metrics.refused_connections);
            // A limit that is reached is logged by itself.
            if status.code() != Code::ResourceExhausted
                && let Some(more) = self.said[0].admit(Instant::now())
            {
                info!(proxy = id, address, reason = status.message(), more, "discovery refused");
            }
            let (proxy, address, reason) = (Text(&id), Text(&address), Text(status.message()));
            self.audit.record(Audited::DiscoveryRefused { address, proxy, reason, suppressed: 0 });
        })
    }

    fn answer(&self, question: &Question, call: &Request<()>) -> Result<DiscoveryResponse, Status> {
        let address = address(call.extensions());
        let asked = question.to_string();
        let answered = || {
            let Caller::Proven(proof) = caller(call.extensions())? else {
                return Err(Status::unauthenticated("debug types are served on the TLS port only"));
            };
            let id = &proof.id;
            self.access.check_debug(id, &self.publisher.root_namespace())?;
            let (address, identity) = (Text(&address), &id.to_string());
            self.audit.record(Audited::AdminRead { address, identity: Text(identity), page: Text(&asked) });
            debug::answer(question, &self.pages)
        };
        answered().inspect_err(|status| {
            if let Some(more) = self.said[1].admit(Instant::now()) {
                info!(asked, address, reason = status.message(), more, "debug type refused");
            }
            let (address, page, reason) = (Text(&address), Text(&asked), Text(status.message()));
            self.audit.record(Audited::AdminRefused { address, page, reason, suppressed: 0 });
        })
    }
}

/// The version of Istio that a proxy says it has, at most 64 bytes of it.
fn version(node: &Node) -> String {
    let said = node.metadata.as_ref().and_then(|metadata| metadata.fields.get("ISTIO_VERSION"));
    match said.and_then(|value| value.kind.as_ref()) {
        Some(value::Kind::StringValue(text)) => text[..text.floor_char_boundary(64)].to_owned(),
        _ => String::new(),
    }
}

/// A workload may ask for its own configuration only, from the pod that its credential was given to.
fn authorize(node: &ProxyNode, Proof { id, pod, .. }: &Proof) -> Result<(), Status> {
    let view = &node.view;
    if view.namespace == id.namespace && view.service_account == id.service_account {
        return match pod {
            Some(pod) if pod.name != node.pod => Err(Status::permission_denied(format!(
                "a credential of pod {} may not take the configuration of {}",
                pod.name, node.id
            ))),
            _ => Ok(()),
        };
    }
    Err(Status::permission_denied(format!(
        "{id} may not take the configuration of {}, which runs as {}/{}",
        node.id, view.namespace, view.service_account
    )))
}

/// Node metadata as JSON.
fn object(fields: Struct) -> Map<String, Value> {
    fields.fields.into_iter().map(|(name, value)| (name, json(value))).collect()
}

fn json(value: ProtoValue) -> Value {
    match value.kind {
        None | Some(value::Kind::NullValue(_)) => Value::Null,
        Some(value::Kind::BoolValue(value)) => value.into(),
        Some(value::Kind::StringValue(text)) => text.into(),
        Some(value::Kind::ListValue(list)) => list.values.into_iter().map(json).collect(),
        Some(value::Kind::StructValue(fields)) => object(fields).into(),
        Some(value::Kind::NumberValue(number)) => whole(number)
            .map(Value::from)
            .or_else(|| Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::Null),
    }
}

/// Ports are numbers without a fraction, but arrive as floating point.
fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

#[cfg(test)]
mod tests {
    use skysail_core::SpiffeId;
    use skysail_xds::istio::{boolean, list, number, string, structure};

    use super::*;

    #[test]
    fn metadata_become_json() {
        let value = structure([
            ("LABELS", structure([("app", string("a"))])),
            ("POD_PORTS", list([structure([("containerPort", number(9080.0))])])),
            ("HALF", number(0.5)),
            ("DNS_CAPTURE", boolean(true)),
        ]);
        let expected = serde_json::json!({
            "LABELS": {"app": "a"}, "POD_PORTS": [{"containerPort": 9080}], "HALF": 0.5, "DNS_CAPTURE": true
        });
        assert_eq!(json(value), expected);
    }

    #[test]
    fn a_workload_takes_its_own_configuration_only() {
        let metadata = serde_json::json!({"SERVICE_ACCOUNT": "reviews"});
        let id = "sidecar~10.0.0.1~reviews-1.default~default.svc.cluster.local";
        let node = ProxyNode::parse(id, metadata, Locality::default()).unwrap();
        let caller = |namespace: &str, account: &str, pod: Option<&str>| {
            Proof::by_token(SpiffeId::new("cluster.local", namespace, account), pod)
        };
        assert!(authorize(&node, &caller("default", "reviews", None)).is_ok());
        assert!(authorize(&node, &caller("default", "reviews", Some("reviews-1"))).is_ok());
        assert!(authorize(&node, &caller("default", "reviews", Some("reviews-2"))).is_err());
        assert!(authorize(&node, &caller("other", "reviews", None)).is_err());
        assert!(authorize(&node, &caller("default", "ratings", None)).is_err());
    }
}

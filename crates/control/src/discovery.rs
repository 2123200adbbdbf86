//! Admission of proxies to the discovery service: authentication, the declared node, and the view that the proxy
//! subscribes to.

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
    server::{DebugRequest, Ended, Event, View, Views},
};
use tonic::{Code, Request, Status};
use tracing::info;

use crate::{
    access::Access,
    admin::Pages,
    audit::{AuditEvent, AuditLog, ExternalText},
    authentication::{Authentication, Caller, Principal, peer_address},
    debug,
    metrics::count,
    platform::PodRef,
    prefetch::PrefetchHistory,
    publish::{NewClient, Publisher, Refused},
};

/// Provides the discovery service with views of the mesh.
pub(crate) struct Discovery {
    publisher: Arc<Publisher>,
    authentication: Arc<Authentication>,
    prefetch: Arc<PrefetchHistory>,
    pages: Arc<Pages>,
    access: Arc<Access>,
    audit: Arc<AuditLog>,
    /// Cluster of proxies that declare none.
    cluster_id: String,
    /// Throttles the log lines about refused streams.
    refused_streams: Throttle,
    /// Throttles the log lines about refused debug types.
    refused_debug_types: Throttle,
}

impl Discovery {
    pub(crate) fn new(
        authentication: Arc<Authentication>,
        pages: Arc<Pages>,
        access: Arc<Access>,
        audit: Arc<AuditLog>,
        cluster_id: String,
    ) -> Self {
        let (publisher, prefetch) = (Arc::clone(&pages.publisher), Arc::clone(&pages.prefetch));
        let throttle = || Throttle::new(Duration::from_secs(1));
        Self {
            publisher,
            authentication,
            prefetch,
            pages,
            access,
            audit,
            cluster_id,
            refused_streams: throttle(),
            refused_debug_types: throttle(),
        }
    }

    /// Authenticates the caller and authorizes the node that it declares. Returns the client and the future that ends
    /// its access.
    async fn authorize_client(
        &self,
        node: Node,
        form: Form,
        call: &Request<()>,
    ) -> Result<(NewClient, Ended), Status> {
        let version = version(&node);
        let mut node = self.parse_node(node).map_err(Status::invalid_argument)?;
        let principal = match self.authentication.confirmed(call).await? {
            Caller::Unauthenticated => None,
            Caller::Authenticated(principal) => Some(principal),
        };
        if let Some(principal) = &principal {
            authorize(&node, principal)?;
            node.view.is_authenticated = true;
        }
        let identity = principal.as_ref().map(|principal| principal.id.to_string()).unwrap_or_default();
        let pod = BoundPod { name: node.pod.clone(), uid: String::new() };
        let declared = PodRef { namespace: node.view.namespace.clone(), pod };
        let from = peer_address(call.extensions()).as_ref().map(SocketAddr::ip);
        let ended: Ended = Box::pin(self.authentication.access_end(principal.as_deref(), from, declared));
        // An unauthenticated identity has another form than a SPIFFE ID, so that it shares no limit or history with a
        // principal.
        let accounted_to: Arc<str> = match identity.as_str() {
            "" => format!("{}/{}", node.view.namespace, node.view.service_account).into(),
            spiffe_id => spiffe_id.into(),
        };
        let address = address(call.extensions());
        Ok((NewClient { node, version, address, identity, accounted_to, form }, ended))
    }

    /// Connects the client to its view.
    async fn subscribe(&self, client: NewClient, ended: Ended) -> Result<View, Status> {
        let identity = Arc::clone(&client.accounted_to);
        let connected = self.publisher.connect(client).await;
        let (resources, client) = connected.map_err(|refused| {
            let reason = refused.reason(&self.publisher.settings);
            match refused {
                Refused::Closed => Status::unavailable(reason),
                Refused::AccountMismatch(_) | Refused::Registration(_) => Status::permission_denied(reason),
                Refused::Limit(_) => Status::resource_exhausted(reason),
                Refused::Broken(_) => Status::internal(reason),
            }
        })?;
        let prefetch = Arc::clone(&self.prefetch);
        let remembered = prefetch.hosts_of(&identity, &resources.snapshot.borrow().clone());
        let user = Arc::clone(&identity);
        let report = move |event: Event<'_>| match event {
            Event::HostUsed { host } => prefetch.record_use(&user, host),
            Event::HostUnused { host } => prefetch.record_unused(&user, host),
            event => client.report(event),
        };
        Ok(View { identity, resources, report: Box::new(report), remembered, ended })
    }

    fn parse_node(&self, node: Node) -> Result<ProxyNode, String> {
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
        let view = match self.authorize_client(node, form, &call).await {
            Ok((client, ended)) => self.subscribe(client, ended).await,
            Err(refused) => Err(refused),
        };
        view.inspect_err(|status| {
            count(&self.publisher.metrics.refused_connections);
            // The publisher logs refusals by a limit.
            if status.code() != Code::ResourceExhausted
                && let Some(more) = self.refused_streams.admit(Instant::now())
            {
                info!(proxy = id, address, reason = status.message(), more, "discovery refused");
            }
            let (proxy, address, reason) =
                (ExternalText(&id), ExternalText(&address), ExternalText(status.message()));
            self.audit.record(AuditEvent::DiscoveryRefused { address, proxy, reason, suppressed: 0 });
        })
    }

    async fn debug_response(
        &self,
        debug_request: &DebugRequest,
        call: &Request<()>,
    ) -> Result<DiscoveryResponse, Status> {
        let address = address(call.extensions());
        let debug_type = debug_request.to_string();
        let caller = self.authentication.confirmed(call).await;
        let answer = || {
            let Caller::Authenticated(principal) = caller? else {
                return Err(Status::unauthenticated("debug types are served on the TLS port only"));
            };
            let id = &principal.id;
            self.access.check_debug(id, &self.publisher.root_namespace())?;
            let (address, identity) = (ExternalText(&address), &id.to_string());
            self.audit.record(AuditEvent::AdminRead {
                address,
                identity: ExternalText(identity),
                page: ExternalText(&debug_type),
            });
            debug::response(debug_request, &self.pages)
        };
        answer().inspect_err(|status| {
            if let Some(more) = self.refused_debug_types.admit(Instant::now()) {
                info!(debug_type, address, reason = status.message(), more, "debug type refused");
            }
            let (address, page, reason) =
                (ExternalText(&address), ExternalText(&debug_type), ExternalText(status.message()));
            self.audit.record(AuditEvent::AdminRefused { address, page, reason, suppressed: 0 });
        })
    }
}

/// Returns the Istio version that a proxy declares, truncated to 64 bytes.
fn version(node: &Node) -> String {
    let declared = node.metadata.as_ref().and_then(|metadata| metadata.fields.get("ISTIO_VERSION"));
    match declared.and_then(|value| value.kind.as_ref()) {
        Some(value::Kind::StringValue(text)) => text[..text.floor_char_boundary(64)].to_owned(),
        _ => String::new(),
    }
}

/// Authorizes a workload for its own configuration only, and a credential of a pod for that pod only.
fn authorize(node: &ProxyNode, Principal { id, pod, .. }: &Principal) -> Result<(), Status> {
    let view = &node.view;
    if view.namespace == id.namespace && view.service_account == id.service_account {
        return match pod {
            Some(pod) if pod.name != node.pod => Err(Status::permission_denied(format!(
                "a credential of pod {} may not receive the configuration of {}",
                pod.name, node.id
            ))),
            _ => Ok(()),
        };
    }
    Err(Status::permission_denied(format!(
        "{id} may not receive the configuration of {}, which declares the service account {}/{}",
        node.id, view.namespace, view.service_account
    )))
}

/// Converts node metadata to JSON.
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
        Some(value::Kind::NumberValue(number)) => integer(number)
            .map(Value::from)
            .or_else(|| Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::Null),
    }
}

/// Returns a whole number as an integer: protobuf's `Value` has floating point numbers only, also for ports.
fn integer(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

#[cfg(test)]
mod tests {
    use skysail_core::SpiffeId;
    use skysail_xds::istio::{boolean, list, number, string, structure};

    use super::*;

    #[test]
    fn metadata_are_converted_to_json() {
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
    fn a_workload_receives_its_own_configuration_only() {
        let metadata = serde_json::json!({"SERVICE_ACCOUNT": "reviews"});
        let id = "sidecar~10.0.0.1~reviews-1.default~default.svc.cluster.local";
        let node = ProxyNode::parse(id, metadata, Locality::default()).unwrap();
        let caller = |namespace: &str, account: &str, pod: Option<&str>| {
            Principal::with_token(SpiffeId::new("cluster.local", namespace, account), pod)
        };
        assert!(authorize(&node, &caller("default", "reviews", None)).is_ok());
        assert!(authorize(&node, &caller("default", "reviews", Some("reviews-1"))).is_ok());
        assert!(authorize(&node, &caller("default", "reviews", Some("reviews-2"))).is_err());
        assert!(authorize(&node, &caller("other", "reviews", None)).is_err());
        assert!(authorize(&node, &caller("default", "ratings", None)).is_err());
    }
}

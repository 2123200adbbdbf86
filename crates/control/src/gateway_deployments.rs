//! Deploys the proxies of Gateways on a cluster: a ServiceAccount, a Deployment and a Service for each, which belong to the
//! Gateway. The leader does so. It also makes the GatewayClass of Skysail.
//!
//! Objects are applied when they differ from what was applied last, and at intervals, so that deleted ones come back. The
//! pods are injected here: the webhook need not answer, and annotations of the Gateway cannot change the proxy's container.
//! The number of replicas is left to users and autoscalers.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    convert::Infallible,
    future::pending,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{StreamExt as _, stream};
use serde_json::{Map, Value, json};
use skysail_core::{logging::Throttle, names::HEALTH_PORT};
use skysail_inject::{InjectError, Owner, Settings, inject};
use skysail_kubernetes::{ApiServer, ClusterObject, ObjectOwner, Statuses};
use skysail_model::{
    Kind,
    api::gateway_api::{GROUP, ListenerProtocol},
    world::{GatewayDeployment, OWN_CLASS},
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

use crate::publish::Publisher;

/// Interval at which all objects are applied again, and failed ones are tried again.
const INTERVAL: Duration = Duration::from_secs(30);
/// Time in which further changes are awaited, as for statuses.
const SETTLE: Duration = Duration::from_millis(100);
/// Number of Gateways that are deployed at the same time: a slow one does not delay the others.
const DEPLOYMENTS: usize = 8;
/// Maximum number of Gateways that a message names.
const MAX_NAMED: usize = 20;
/// Label of the deployed objects, and its value.
const MANAGED: (&str, &str) = ("gateway.istio.io/managed", "skysail.io-gateway-controller");
/// Port of health checks at the Service, as cloud providers expect it.
const STATUS_PORT: &str = "status-port";

/// Deploys proxies while this replica leads.
pub(crate) struct GatewayDeployer {
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) server: ApiServer,
    pub(crate) statuses: Arc<Statuses>,
    pub(crate) settings: Settings,
    /// Whether this replica is the leader.
    pub(crate) leads: watch::Receiver<bool>,
    /// Told after each publication of a change of the cluster's objects.
    pub(crate) published: watch::Receiver<()>,
}

/// Objects of a Gateway at the last attempt to apply them, whether it succeeded or failed.
struct Attempt {
    owner: ObjectOwner,
    objects: Vec<Value>,
    succeeded: bool,
}

impl GatewayDeployer {
    /// Deploys without end.
    pub(crate) async fn run(mut self) -> Infallible {
        let mut attempts: HashMap<ClusterObject, Attempt> = HashMap::new();
        let (lines, class_lines) = (Throttle::new(INTERVAL), Throttle::new(INTERVAL));
        let mut ticks = interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut is_first, mut is_due) = (true, false);
        loop {
            while !*self.leads.borrow_and_update() {
                attempts.clear();
                if self.leads.changed().await.is_err() {
                    return pending().await;
                }
            }
            self.published.mark_unchanged();
            let publisher = Arc::clone(&self.publisher);
            let read = move || {
                publisher.with_served(|world, _| {
                    (world.gateway_deployments(), world.has_gateway_class(OWN_CLASS.0))
                })
            };
            let (mut meant, has_class) = tokio::task::spawn_blocking(read).await.unwrap_or_default();
            if !has_class && (is_due || is_first) {
                self.create_class(&class_lines).await;
            }
            is_first = false;
            meant.retain(|of| self.is_own(of));
            let known: HashSet<ClusterObject> = meant.iter().map(object_of).collect();
            attempts.retain(|gateway, _| known.contains(gateway));
            self.deploy(&meant, is_due, &mut attempts, &lines).await;
            is_due = false;
            tokio::select! {
                _ = self.published.changed() => {}
                _ = ticks.tick() => is_due = true,
                ended = self.leads.changed() => if ended.is_err() { return pending().await },
            }
            sleep(SETTLE).await;
        }
    }

    /// Creates the GatewayClass, if the cluster knows the kind.
    async fn create_class(&self, lines: &Throttle) {
        let (name, controller) = OWN_CLASS;
        let class = json!({ "apiVersion": format!("{GROUP}/v1"), "kind": Kind::GatewayClass.as_str(),
            "metadata": { "name": name }, "spec": { "controllerName": controller } });
        match self.server.create_missing(&class).await {
            Ok(true) => info!(name, "the GatewayClass is created"),
            Ok(false) => {}
            Err(error) => {
                if let Some(more) = lines.admit(Instant::now()) {
                    warn!(%error, more, "the GatewayClass is not created; it is tried again in 30 s");
                }
            }
        }
    }

    fn is_own(&self, deployment: &GatewayDeployment) -> bool {
        match deployment.revision.as_str() {
            "" => self.settings.is_default_revision,
            revision => revision == self.settings.revision,
        }
    }

    /// Applies the objects of the Gateways for which they differ from the last attempt; of all, if `is_due`.
    async fn deploy(
        &self,
        meant: &[GatewayDeployment],
        is_due: bool,
        attempts: &mut HashMap<ClusterObject, Attempt>,
        lines: &Throttle,
    ) {
        let due = meant.iter().filter_map(|deployment| {
            let gateway = object_of(deployment);
            // Without it, the Gateway comes from a file, or is gone.
            let uid = self.statuses.get(&gateway)?.uid;
            let owner = ObjectOwner { version: format!("{GROUP}/v1"), object: gateway, uid };
            let (objects, refused) = match objects(deployment, &self.settings) {
                Ok(objects) => (objects, None),
                Err(error) => (Vec::new(), Some(error.to_string())),
            };
            let last = attempts.get(&owner.object);
            let is_new = last.is_none_or(|last| last.owner != owner || last.objects != objects);
            let is_first = last.is_none_or(|last| !last.succeeded);
            let name = deployment.gateway.to_string();
            let attempt = Attempt { owner, objects, succeeded: false };
            (is_due || is_new).then_some((name, attempt, refused, is_first))
        });
        let due: Vec<_> = due.collect();
        let apply = async |(gateway, attempt, refused, is_first): (String, Attempt, _, bool)| {
            let result = match refused {
                Some(refused) => Err(refused),
                None => self.apply(&attempt).await,
            };
            (gateway, attempt, result, is_first)
        };
        let mut results = stream::iter(due).map(apply).buffer_unordered(DEPLOYMENTS);
        let mut failed: Vec<(String, String)> = Vec::new();
        while let Some((gateway, mut attempt, result, is_first)) = results.next().await {
            attempt.succeeded = result.is_ok();
            match result {
                Ok(()) if is_first => info!(gateway, "the proxies of a Gateway are deployed"),
                Ok(()) => {}
                Err(error) => failed.push((gateway, error)),
            }
            attempts.insert(attempt.owner.object.clone(), attempt);
        }
        if let Some((_, error)) = failed.first()
            && let Some(more) = lines.admit(Instant::now())
        {
            let names: Vec<&str> =
                failed.iter().take(MAX_NAMED).map(|(gateway, _)| gateway.as_str()).collect();
            let (count, gateways) = (failed.len(), names.join(", "));
            warn!(
                error,
                more, count, gateways, "the proxies of Gateways are not deployed; it is tried again in 30 s"
            );
        }
    }

    async fn apply(&self, attempt: &Attempt) -> Result<(), String> {
        for object in &attempt.objects {
            if !*self.leads.borrow() {
                return Err("another replica leads now".to_owned());
            }
            self.server.apply_owned(&attempt.owner, object).await.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

fn object_of(deployment: &GatewayDeployment) -> ClusterObject {
    ClusterObject {
        group: GROUP.to_owned(),
        kind: Kind::KubernetesGateway.as_str().to_owned(),
        namespace: deployment.gateway.namespace.clone(),
        name: deployment.gateway.name.clone(),
    }
}

/// Returns the objects of a Gateway, in the order in which they are applied.
fn objects(of: &GatewayDeployment, settings: &Settings) -> Result<Vec<Value>, InjectError> {
    let labels = |own: &[(&str, &str)]| {
        let mut labels: Map<String, Value> = texts(&of.infrastructure.labels);
        labels.extend(texts(&of.selector));
        labels.extend(own.iter().map(|(key, value)| ((*key).to_owned(), (*value).into())));
        labels
    };
    let object = |version: &str, kind: &str, name: &str, rest: Value| {
        let mut object = json!({ "apiVersion": version, "kind": kind, "metadata": {
            "name": name, "labels": labels(&[MANAGED]), "annotations": texts(&of.infrastructure.annotations),
        }});
        if let (Value::Object(object), Value::Object(rest)) = (&mut object, rest) {
            object.extend(rest);
        }
        object
    };
    let template = pod(of, settings, labels(&[MANAGED, ("sidecar.istio.io/inject", "false")]))?;
    let deployment = json!({ "spec": { "selector": { "matchLabels": of.selector }, "template": template } });
    // Without a Service, no proxies start.
    Ok(vec![
        object("v1", "ServiceAccount", &of.account, json!({})),
        object("v1", "Service", &of.name, json!({ "spec": service(of) })),
        object("apps/v1", "Deployment", &of.name, deployment),
    ])
}

/// Returns the pod template. Labels and annotations of users are added after the injection, which would obey them.
fn pod(
    of: &GatewayDeployment,
    settings: &Settings,
    labels: Map<String, Value>,
) -> Result<Value, InjectError> {
    let ports = of.ports.keys().map(|port| json!({ "containerPort": port, "protocol": "TCP" }));
    let bare = json!({
        "metadata": {
            "labels": of.selector,
            "annotations": { "inject.istio.io/templates": "gateway" },
        },
        "spec": {
            "serviceAccountName": of.account,
            // The proxy has a token of its own, which the API server does not accept.
            "automountServiceAccountToken": false,
            // The proxy listens on the ports of the listeners without a capability.
            "securityContext": { "sysctls": [{ "name": "net.ipv4.ip_unprivileged_port_start", "value": "0" }] },
            "containers": [{ "name": "istio-proxy", "image": "auto", "ports": ports.collect::<Vec<_>>() }],
        },
    });
    let owner = Owner {
        api_version: "apps/v1".into(),
        kind: "Deployment".into(),
        name: of.name.clone(),
        namespace: of.gateway.namespace.clone(),
    };
    let mut pod = inject(&bare, &owner, settings)?.pod;
    for (field, own) in [("labels", labels), ("annotations", texts(&of.infrastructure.annotations))] {
        if let Some(fields) = pod["metadata"][field].as_object_mut() {
            let injected = std::mem::take(fields);
            fields.extend(own);
            fields.extend(injected);
        }
    }
    Ok(pod)
}

fn service(of: &GatewayDeployment) -> Value {
    let port = |name: &str, port: u16, protocol: &str| json!({ "name": name, "port": port, "protocol": "TCP", "appProtocol": protocol });
    let mut ports = vec![port(STATUS_PORT, HEALTH_PORT, "tcp")];
    ports.extend(of.ports.iter().filter(|(number, _)| **number != HEALTH_PORT).map(|(number, protocol)| {
        let protocol = match protocol {
            ListenerProtocol::Http => "http",
            ListenerProtocol::Https => "https",
            ListenerProtocol::Tls => "tls",
            _ => "tcp",
        };
        port(&format!("{protocol}-{number}"), *number, protocol)
    }));
    let kind = if of.service_type.is_empty() { "LoadBalancer" } else { &of.service_type };
    let mut service = json!({ "type": kind, "selector": of.selector, "ports": ports,
                              "ipFamilyPolicy": "PreferDualStack" });
    if !of.address.is_empty() {
        service["loadBalancerIP"] = of.address.as_str().into();
    }
    service
}

fn texts(from: &BTreeMap<String, String>) -> Map<String, Value> {
    from.iter().map(|(key, value)| (key.clone(), value.as_str().into())).collect()
}

#[cfg(test)]
mod tests {
    use skysail_model::{ObjectKey, api::gateway_api::Infrastructure};

    use super::*;

    fn deployment() -> GatewayDeployment {
        let texts = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        GatewayDeployment {
            gateway: ObjectKey {
                kind: Kind::KubernetesGateway,
                namespace: "edge".into(),
                name: "web".into(),
            },
            revision: String::new(),
            name: "web-skysail".into(),
            account: "web-skysail".into(),
            selector: texts(&[("gateway.networking.k8s.io/gateway-name", "web")]),
            infrastructure: Infrastructure::default(),
            service_type: String::new(),
            address: String::new(),
            ports: BTreeMap::from([(80, ListenerProtocol::Http), (443, ListenerProtocol::Tls)]),
        }
    }

    #[test]
    fn labels_and_annotations_of_users_do_not_change_the_proxy() {
        let plain = objects(&deployment(), &Settings::new("proxy:1")).unwrap();
        let mut hostile = deployment();
        hostile.infrastructure.labels.extend([
            ("team".to_owned(), "one".to_owned()),
            ("sidecar.istio.io/inject".to_owned(), "true".to_owned()),
            ("gateway.networking.k8s.io/gateway-name".to_owned(), "other".to_owned()),
        ]);
        hostile.infrastructure.annotations.extend([
            ("sidecar.istio.io/userVolume".to_owned(), r#"{"host":{"hostPath":{"path":"/"}}}"#.to_owned()),
            ("sidecar.istio.io/proxyImage".to_owned(), "evil/image".to_owned()),
            ("inject.istio.io/templates".to_owned(), "sidecar".to_owned()),
        ]);
        let hostile = objects(&hostile, &Settings::new("proxy:1")).unwrap();
        let template = |objects: &[Value]| objects[2]["spec"]["template"].clone();
        assert_eq!(template(&plain)["spec"], template(&hostile)["spec"]);
        let labels = &template(&hostile)["metadata"]["labels"];
        assert_eq!(labels["team"], "one");
        assert_eq!(labels["sidecar.istio.io/inject"], "false");
        assert_eq!(labels["gateway.networking.k8s.io/gateway-name"], "web");
        assert_eq!(template(&hostile)["metadata"]["annotations"]["inject.istio.io/templates"], "gateway");
    }

    #[test]
    fn the_service_has_the_ports_of_the_listeners() {
        let service = service(&deployment());
        let ports: Vec<_> =
            service["ports"].as_array().unwrap().iter().map(|of| of["name"].clone()).collect();
        assert_eq!(ports, ["status-port", "http-80", "tls-443"]);
        assert_eq!((&service["type"], &service["loadBalancerIP"]), (&json!("LoadBalancer"), &Value::Null));
        let asks = GatewayDeployment { service_type: "ClusterIP".into(), ..deployment() };
        assert_eq!(self::service(&asks)["type"], "ClusterIP");
    }

    #[test]
    fn the_number_of_replicas_is_left_to_others() {
        let objects = objects(&deployment(), &Settings::new("proxy:1")).unwrap();
        assert_eq!(objects[2]["spec"]["replicas"], Value::Null);
    }
}

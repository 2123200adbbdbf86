//! Subscriptions and acknowledgements of one sidecar, without IO.
//!
//! With the whole mesh it subscribes in Envoy's order: clusters, endpoints, listeners, routes, virtual hosts. Each step
//! begins after the previous one has arrived. On demand it subscribes at once, by name, to the services that its
//! workload uses.

use super::{
    mesh,
    message::{Ask, Field, Form, Kind, Response, names, object, put},
};

/// Subscription of the sidecars.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Subscription {
    /// All resources, like Envoy.
    Mesh,
    /// The services that the workload uses, by name.
    Used,
}

/// Settings that all sidecars share.
pub(crate) struct Plan {
    pub(crate) form: Form,
    pub(crate) subscription: Subscription,
    pub(crate) services: usize,
    pub(crate) namespaces: usize,
    /// Number of services that each workload uses, on demand.
    pub(crate) used: usize,
    /// Virtual hosts are sent one by one, not within their route configuration.
    pub(crate) uses_vhds: bool,
    /// Encoded names of all endpoints and routes, after the first sidecar has learnt them.
    pub(crate) endpoint_names: Vec<u8>,
    pub(crate) route_names: Vec<u8>,
}

impl Plan {
    /// Returns the types to which each sidecar subscribes, in this order.
    fn kinds(&self) -> &'static [Kind] {
        if self.uses_vhds { &Kind::ALL } else { &Kind::ALL[..4] }
    }
}

/// Set of the types of which a first response has arrived.
type Kinds = u8;

/// State of a sidecar.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sidecar {
    pub(crate) number: usize,
    come: Kinds,
}

impl Sidecar {
    pub(crate) fn new(number: usize) -> Self {
        Self { number, come: 0 }
    }

    /// Returns true if a response of each type has arrived.
    pub(crate) fn is_configured(self, plan: &Plan) -> bool {
        self.come == (1 << plan.kinds().len()) - 1
    }

    /// Writes the first requests.
    pub(crate) fn begin(self, plan: &Plan, out: &mut Vec<u8>) {
        let node = self.node(plan);
        let mut node = node.as_slice();
        let kinds = match plan.subscription {
            Subscription::Mesh => &plan.kinds()[..1],
            Subscription::Used => plan.kinds(),
        };
        for kind in kinds {
            Ask { form: plan.form, kind: *kind, node, nonce: b"", names: &self.names(plan, *kind) }.put(out);
            node = b"";
        }
    }

    /// Writes the requests that follow a response.
    pub(crate) fn answer(&mut self, plan: &Plan, response: &Response, out: &mut Vec<u8>) {
        let Some(kind) = response.kind else { return };
        let bit = 1 << kind as u8;
        let is_first = self.come & bit == 0;
        self.come |= bit;
        let named = if plan.form == Form::Sotw { self.names(plan, kind) } else { Vec::new() };
        Ask { form: plan.form, kind, node: b"", nonce: &response.nonce, names: &named }.put(out);
        if is_first
            && plan.subscription == Subscription::Mesh
            && let Some(next) = plan.kinds().get(kind as usize + 1)
        {
            Ask { form: plan.form, kind: *next, node: b"", nonce: b"", names: &self.names(plan, *next) }
                .put(out);
        }
    }

    /// Returns true if the sidecar subscribes to the service that changes.
    pub(crate) fn uses_changed(self, plan: &Plan) -> bool {
        plan.subscription == Subscription::Mesh || self.used(plan).any(|service| service == mesh::CHANGED)
    }

    /// Returns true if its workload belongs to this service.
    pub(crate) fn is_of(self, plan: &Plan, service: usize) -> bool {
        self.service(plan) == service
    }

    /// Returns its own service.
    fn service(self, plan: &Plan) -> usize {
        self.number % plan.services
    }

    /// Returns the services that its workload uses: its own, and those that follow it by number.
    fn used(self, plan: &Plan) -> impl Iterator<Item = usize> {
        let (own, all) = (self.service(plan), plan.services);
        (0..plan.used.min(all)).map(move |next| (own + next) % all)
    }

    fn names(self, plan: &Plan, kind: Kind) -> Vec<u8> {
        match (plan.subscription, kind) {
            (Subscription::Mesh, Kind::Cluster | Kind::Listener) => Vec::new(),
            (Subscription::Mesh, Kind::Endpoint) => plan.endpoint_names.clone(),
            (Subscription::Mesh, Kind::Route | Kind::VirtualHost) => plan.route_names.clone(),
            (Subscription::Used, Kind::Cluster | Kind::Endpoint) => {
                let clusters: Vec<String> = self
                    .used(plan)
                    .map(|service| format!("outbound|80||{}", mesh::host(service, plan.namespaces)))
                    .collect();
                names(clusters.iter().map(String::as_str))
            }
            (Subscription::Used, Kind::Listener) => {
                names(["virtualInbound", "virtualOutbound", "0.0.0.0_80"])
            }
            (Subscription::Used, Kind::Route) => names(["80"]),
            (Subscription::Used, Kind::VirtualHost) => {
                let hosts: Vec<String> = self
                    .used(plan)
                    .map(|service| format!("80/{}:80", mesh::host(service, plan.namespaces)))
                    .collect();
                names(hosts.iter().map(String::as_str))
            }
        }
    }

    /// Encodes the node, `envoy.config.core.v3.Node`.
    pub(super) fn node(self, plan: &Plan) -> Vec<u8> {
        let service = self.service(plan);
        let (app, namespace) = (format!("svc-{service}"), mesh::namespace(service, plan.namespaces));
        let pod = self.number / plan.services;
        let address = mesh::address(service, pod).to_string();
        let labels = object(&[("app", Field::Text(&app)), ("version", Field::Text("v1"))]);
        let metadata = object(&[
            ("CLUSTER_ID", Field::Text("Kubernetes")),
            ("INSTANCE_IPS", Field::Text(&address)),
            ("LABELS", Field::Object(labels)),
            ("MESH_ID", Field::Text("cluster.local")),
            ("NAMESPACE", Field::Text(&namespace)),
            ("SERVICE_ACCOUNT", Field::Text("default")),
            ("SKYSAIL_RESOLVED", Field::Text("true")),
            ("SKYSAIL_VHDS", Field::Text(if plan.uses_vhds { "true" } else { "false" })),
            ("WORKLOAD_NAME", Field::Text(&app)),
        ]);
        let mut node = Vec::new();
        let id = format!("sidecar~{address}~{app}-{pod}.{namespace}~{namespace}.svc.cluster.local");
        put(&mut node, 1, id.as_bytes());
        put(&mut node, 2, format!("{app}.{namespace}").as_bytes());
        put(&mut node, 3, &metadata);
        node
    }
}

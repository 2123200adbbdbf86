//! After any sequence of changes, each proxy has the resources that a fresh start would give it, and receives no other
//! changes.

mod objects;
mod refusals;
mod scopes;
mod secrets;
mod views;

use std::{
    collections::BTreeSet,
    sync::{LazyLock, atomic::Ordering::Relaxed},
};

use skysail_model::{ClientScope, ProxyNode, ProxyView, api::kube::Locality};
use skysail_xds::{Changes, Kind, Resource, Snapshot, client::Form, server::ResourceFeed};
use tokio::runtime::Runtime;

use super::{admission::Connected, *};
use crate::metrics::Limit;

/// Runtime of the compilations.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// Files with the possible contents of each. Without content, the file does not exist.
const FILES: [(&str, &[&str]); 29] = [
    (
        "service-a",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: a, namespace: x}, spec: {clusterIP: 10.0.0.1, selector: {app: a}, ports: [{name: http, port: 80, targetPort: 8080}]}}",
            "{apiVersion: v1, kind: Service, metadata: {name: a, namespace: x}, spec: {clusterIP: 10.0.0.1, selector: {app: a}, ports: [{name: tcp, port: 81}, {name: http, port: 80, targetPort: web}]}}",
            "{apiVersion: v1, kind: Service, metadata: {name: a, namespace: x, annotations: {networking.istio.io/exportTo: .}}, spec: {clusterIP: 10.0.0.1, selector: {app: a}, ports: [{name: http, port: 80, targetPort: 8080}]}}",
        ],
    ),
    (
        "service-b",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: b, namespace: y}, spec: {clusterIP: 10.0.0.2, selector: {app: b}, ports: [{name: http, port: 80}, {name: grpc, port: 9000}]}}",
            "{apiVersion: v1, kind: Service, metadata: {name: b, namespace: y}, spec: {clusterIP: None, selector: {app: b}, ports: [{name: tcp-db, port: 3306}]}}",
        ],
    ),
    (
        "service-plain",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: plain, namespace: x}, spec: {clusterIP: 10.0.0.3, ports: [{name: undeclared, port: 7000}]}}",
        ],
    ),
    (
        "slice-a",
        &[
            "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1, namespace: x, labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [10.1.0.1], nodeName: n, targetRef: {kind: Pod, name: a-1, namespace: x}}]}",
            "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1, namespace: x, labels: {kubernetes.io/service-name: a}}, addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [10.1.0.1]}, {addresses: [10.1.0.9], conditions: {ready: false}}]}",
            "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: a-1, namespace: x, labels: {kubernetes.io/service-name: plain}}, addressType: IPv4, ports: [{name: undeclared, port: 7000}], endpoints: [{addresses: [10.1.0.1]}]}",
        ],
    ),
    (
        "slice-b",
        &[
            "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: b-1, namespace: y, labels: {kubernetes.io/service-name: b}}, addressType: IPv4, ports: [{name: http, port: 80}, {name: tcp-db, port: 3306}], endpoints: [{addresses: [10.1.0.2], targetRef: {kind: Pod, name: b-1, namespace: y}}]}",
        ],
    ),
    (
        "pod-a",
        &[
            "{apiVersion: v1, kind: Pod, metadata: {name: a-1, namespace: x, labels: {app: a, version: v1, security.istio.io/tlsMode: istio}}, spec: {nodeName: n, serviceAccountName: a, containers: [{name: c, image: c, ports: [{name: web, containerPort: 8080}]}]}, status: {podIP: 10.1.0.1, conditions: [{type: Ready, status: 'True'}]}}",
            "{apiVersion: v1, kind: Pod, metadata: {name: a-1, namespace: x, labels: {app: a, version: v2}}, spec: {serviceAccountName: other, containers: [{name: c, image: c}]}, status: {podIP: 10.1.0.1}}",
            "{apiVersion: v1, kind: Pod, metadata: {name: a-1, namespace: x, labels: {app: other}}, spec: {containers: [{name: c, image: c}]}, status: {podIP: 10.1.0.2}}",
        ],
    ),
    (
        "pod-b",
        &[
            "{apiVersion: v1, kind: Pod, metadata: {name: b-1, namespace: y, labels: {app: b, security.istio.io/tlsMode: istio}}, spec: {nodeName: n, containers: [{name: c, image: c}]}, status: {podIP: 10.1.0.2}}",
        ],
    ),
    (
        "node",
        &[
            "{apiVersion: v1, kind: Node, metadata: {name: n, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: z}}}",
            "{apiVersion: v1, kind: Node, metadata: {name: n, labels: {topology.kubernetes.io/region: r, topology.kubernetes.io/zone: other}}}",
        ],
    ),
    (
        "rule-a",
        &[
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: x}, spec: {host: a, subsets: [{name: v1, labels: {version: v1}}]}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: x}, spec: {host: a.x.svc.cluster.local, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: h}}}}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: x}, spec: {host: b.y.svc.cluster.local, trafficPolicy: {connectionPool: {tcp: {maxConnections: 3}}}}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: a, namespace: x}, spec: {host: a, trafficPolicy: {outlierDetection: {consecutive5xxErrors: 3}, loadBalancer: {localityLbSetting: {enabled: true, failoverPriority: [version]}}}}}",
        ],
    ),
    (
        "rule-all",
        &[
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: all, namespace: istio-system}, spec: {host: '*.local', trafficPolicy: {tls: {mode: DISABLE}}}}",
        ],
    ),
    (
        "virtual-service",
        &[
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: x}, spec: {hosts: [a], http: [{timeout: 3s, route: [{destination: {host: a, subset: v1}}]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: x}, spec: {hosts: [a, other.example], http: [{match: [{sourceLabels: {version: v1}}], route: [{destination: {host: b.y.svc.cluster.local}}]}, {route: [{destination: {host: a}}]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: v, namespace: x}, spec: {hosts: [b.y.svc.cluster.local], exportTo: [.], http: [{fault: {abort: {httpStatus: 555, percentage: {value: 100}}}, route: [{destination: {host: b.y.svc.cluster.local}}]}]}}",
        ],
    ),
    (
        "policy",
        &[
            "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: x}, spec: {action: DENY, rules: [{to: [{operation: {paths: [/private]}}]}]}}",
            "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: x}, spec: {selector: {matchLabels: {version: v2}}}}",
        ],
    ),
    (
        "policy-all",
        &[
            "{apiVersion: security.istio.io/v1, kind: AuthorizationPolicy, metadata: {name: p, namespace: istio-system}, spec: {rules: [{from: [{source: {namespaces: [x]}}]}]}}",
        ],
    ),
    (
        "authentication",
        &[
            "{apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: default, namespace: istio-system}, spec: {mtls: {mode: STRICT}}}",
            "{apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: default, namespace: x}, spec: {mtls: {mode: DISABLE}}}",
        ],
    ),
    (
        "entry",
        &[
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: one, namespace: x}, spec: {hosts: [a.example], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}]}}",
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: one, namespace: x}, spec: {hosts: [a.example, c.example], resolution: DNS_ROUND_ROBIN, ports: [{number: 80, name: http, protocol: HTTP}, {number: 81, name: tcp, protocol: TCP}], addresses: [10.9.0.1], exportTo: [.]}}",
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: one, namespace: x}, spec: {hosts: [a.example], resolution: STATIC, ports: [{number: 80, name: http, protocol: HTTP}], endpoints: [{address: 10.8.0.1, labels: {version: v1}, locality: r/z}]}}",
        ],
    ),
    (
        "entry-two",
        &[
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: two, namespace: y}, spec: {hosts: [a.example], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}], location: MESH_INTERNAL, endpoints: [{address: b.example, weight: 2, locality: r/z}, {address: a.example, ports: {http: 8080}, serviceAccount: s}]}}",
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: two, namespace: x}, spec: {hosts: [a.example], resolution: DNS, ports: [{number: 80, name: http, protocol: HTTP}], endpoints: [{address: b.example}]}}",
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: two, namespace: x}, spec: {hosts: [b.example], resolution: NONE, ports: [{number: 81, name: tcp, protocol: TCP}], addresses: [10.9.0.2]}}",
        ],
    ),
    (
        "rule-entry",
        &[
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: e, namespace: x}, spec: {host: a.example, subsets: [{name: v1, labels: {version: v1}}], trafficPolicy: {outlierDetection: {consecutive5xxErrors: 3}}}}",
        ],
    ),
    (
        "sidecar",
        &[
            "{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {name: s, namespace: x}, spec: {egress: [{hosts: [./*]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {name: s, namespace: x}, spec: {workloadSelector: {labels: {version: v2}}, egress: [{port: {number: 80, protocol: HTTP}, hosts: [y/*]}, {port: {number: 3306, protocol: TCP}, bind: 127.0.0.1, captureMode: NONE, hosts: ['*/*']}, {hosts: [./a.x.svc.cluster.local]}], outboundTrafficPolicy: {mode: REGISTRY_ONLY}}}",
            "{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {name: s, namespace: x}, spec: {ingress: [{port: {number: 8080, protocol: HTTP}, defaultEndpoint: '127.0.0.1:80'}], inboundConnectionPool: {tcp: {maxConnections: 3}}}}",
        ],
    ),
    (
        "sidecar-all",
        &[
            "{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {name: s, namespace: istio-system}, spec: {egress: [{hosts: ['*/b.y.svc.cluster.local', ./other.example]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: Sidecar, metadata: {name: s, namespace: istio-system}, spec: {outboundTrafficPolicy: {mode: ALLOW_ANY, egressProxy: {host: b.y.svc.cluster.local, port: {number: 80}}}}}",
        ],
    ),
    // What single namespaces see.
    (
        "private",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: p, namespace: y, annotations: {networking.istio.io/exportTo: 'x,.'}}, spec: {clusterIP: 10.0.0.9, selector: {app: p}, ports: [{name: http, port: 80}, {name: other, port: 99}]}}",
            "{apiVersion: v1, kind: Service, metadata: {name: p, namespace: y, annotations: {networking.istio.io/exportTo: z}}, spec: {clusterIP: 10.0.0.9, selector: {app: p}, ports: [{name: http-new, port: 8099}]}}",
            "{apiVersion: v1, kind: Service, metadata: {name: p, namespace: y}, spec: {clusterIP: None, selector: {app: p}, ports: [{name: http, port: 80}]}}",
        ],
    ),
    (
        "alias",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: other, namespace: z}, spec: {type: ExternalName, externalName: a.x.svc.cluster.local}}",
            "{apiVersion: v1, kind: Service, metadata: {name: other, namespace: x, annotations: {networking.istio.io/exportTo: .}}, spec: {type: ExternalName, externalName: b.y.svc.cluster.local}}",
        ],
    ),
    (
        "like-short-name",
        &[
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: like, namespace: z}, spec: {hosts: [b.y], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}}",
            "{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: like, namespace: x}, spec: {hosts: [c.y.svc.cluster.local], exportTo: [y], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}}",
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: like, namespace: y}, spec: {hosts: [b.y, '*.a.x'], http: [{route: [{destination: {host: b.y.svc.cluster.local}}]}]}}",
        ],
    ),
    (
        "same-address",
        &[
            "{apiVersion: v1, kind: Service, metadata: {name: aa, namespace: z}, spec: {clusterIP: 10.0.0.1, selector: {app: aa}, ports: [{name: http, port: 80}]}}",
        ],
    ),
    (
        "of-namespace",
        &[
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: n, namespace: y}, spec: {hosts: [b], http: [{match: [{sourceNamespace: x}], timeout: 5s, route: [{destination: {host: b}}]}, {route: [{destination: {host: a.x.svc.cluster.local}}]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: n, namespace: y}, spec: {hosts: [b], exportTo: [z, x], http: [{route: [{destination: {host: a.x.svc.cluster.local}}]}]}}",
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: n, namespace: y}, spec: {hosts: [b, away.example], exportTo: [y], tcp: [{route: [{destination: {host: b}}]}], http: [{route: [{destination: {host: b}}]}]}}",
        ],
    ),
    (
        "rule-of-namespace",
        &[
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: n, namespace: z}, spec: {host: a.x.svc.cluster.local, trafficPolicy: {loadBalancer: {consistentHash: {httpHeaderName: h}}}}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: n, namespace: y}, spec: {host: '*.x.svc.cluster.local', trafficPolicy: {loadBalancer: {consistentHash: {useSourceIp: true}}}}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: n, namespace: y}, spec: {host: b, exportTo: [x], trafficPolicy: {loadBalancer: {simple: RANDOM}}}}",
            "{apiVersion: networking.istio.io/v1, kind: DestinationRule, metadata: {name: n, namespace: istio-system}, spec: {host: b.y.svc.cluster.local, exportTo: [z], trafficPolicy: {connectionPool: {tcp: {maxConnections: 3}}}}}",
        ],
    ),
    (
        "delegate",
        &[
            "{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: root, namespace: x}, spec: {hosts: [b.y.svc.cluster.local], http: [{match: [{uri: {prefix: /d}}], delegate: {name: d, namespace: x}}, {route: [{destination: {host: b.y.svc.cluster.local}}]}]}}\n---\n{apiVersion: networking.istio.io/v1, kind: VirtualService, metadata: {name: d, namespace: x}, spec: {http: [{match: [{sourceNamespace: z}], route: [{destination: {host: a}}]}, {match: [{uri: {prefix: /d/e}}], route: [{destination: {host: b.y.svc.cluster.local}}]}]}}",
        ],
    ),
    (
        "telemetry",
        &[
            "{apiVersion: telemetry.istio.io/v1, kind: Telemetry, metadata: {name: t, namespace: y}, spec: {accessLogging: [{disabled: true}]}}",
        ],
    ),
    (
        "filter",
        &[
            "{apiVersion: networking.istio.io/v1alpha3, kind: EnvoyFilter, metadata: {name: f, namespace: z}, spec: {configPatches: [{applyTo: CLUSTER, match: {context: SIDECAR_OUTBOUND}, patch: {operation: MERGE, value: {connect_timeout: 3s}}}]}}",
        ],
    ),
    (
        "mesh",
        &[
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: istio, namespace: istio-system}, data: {mesh: 'defaultServiceExportTo: [.]'}}",
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: istio, namespace: istio-system}, data: {mesh: 'defaultVirtualServiceExportTo: [x]'}}",
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: istio, namespace: istio-system}, data: {mesh: 'defaultDestinationRuleExportTo: [.]'}}",
            "{apiVersion: v1, kind: ConfigMap, metadata: {name: istio, namespace: istio-system}, data: {mesh: 'outboundTrafficPolicy: {mode: REGISTRY_ONLY}'}}",
        ],
    ),
];

/// DNS names of endpoints, and possible answers: all addresses, the current one first.
const NAMES: [&str; 3] = ["a.example", "b.example", "c.example"];
const ADDRESSES: [&[&str]; 4] = [&[], &["10.7.0.1"], &["10.7.0.2", "10.7.0.1"], &["10.7.0.3", "fd00::3"]];

/// Kind of client.
#[derive(Clone, Copy, PartialEq)]
enum ClientKind {
    /// A sidecar.
    Sidecar,
    /// A sidecar with VHDS that receives addresses for DNS names.
    Vhds,
    /// A gRPC client.
    Grpc,
}

/// The proxies: namespace, version, zone, kind.
const PROXIES: [(&str, &str, &str, ClientKind); 9] = [
    ("x", "v1", "z", ClientKind::Sidecar),
    ("x", "v2", "z", ClientKind::Vhds),
    ("y", "v1", "", ClientKind::Vhds),
    ("z", "v1", "", ClientKind::Sidecar),
    ("x", "v1", "z", ClientKind::Vhds),
    ("x", "v1", "z", ClientKind::Grpc),
    ("y", "v2", "", ClientKind::Grpc),
    ("y", "v1", "z", ClientKind::Vhds),
    ("z", "v1", "z", ClientKind::Vhds),
];

/// Subscription of proxies that do not subscribe to all resources.
const SUBSCRIPTION: &str = "outbound|80||a.x.svc.cluster.local";

type Bodies = BTreeMap<(Kind, Arc<str>), Arc<Resource>>;

/// A control plane and its connected proxies.
struct Mesh {
    publisher: Arc<Publisher>,
    lookup_names: watch::Receiver<(Arc<LookupNames>, Duration)>,
    connected: BTreeMap<usize, (ResourceFeed, Connected)>,
}

fn publisher(compiler: Compiler) -> Publisher {
    let limits = ScopeLimits { scopes: 20, scopes_per_identity: 6, views: 400, views_per_identity: 300 };
    let settings = PublishSettings {
        cluster_id: "Kubernetes".into(),
        generated: None,
        access_log: String::new(),
        limits,
    };
    Publisher::new(Arc::default(), settings, compiler)
}

impl Mesh {
    fn new() -> Self {
        let (publisher, lookup_names) = publisher(Compiler::default()).with_dns_lookups();
        Self { publisher: Arc::new(publisher), lookup_names, connected: BTreeMap::new() }
    }

    fn connect(&mut self, proxy: usize) {
        let (namespace, version, zone, kind) = PROXIES[proxy];
        let is_vhds = (kind == ClientKind::Vhds).to_string();
        let id = format!("sidecar~10.2.0.{proxy}~p-{proxy}.{namespace}~{namespace}.svc.cluster.local");
        let metadata = serde_json::json!({
            "WORKLOAD_NAME": "p", "SKYSAIL_VHDS": is_vhds, "SKYSAIL_RESOLVED": is_vhds,
            "LABELS": {"app": "a", "version": version}, "GENERATOR": if kind == ClientKind::Grpc { "grpc" } else { "" },
        });
        let locality = Locality { region: "r".into(), zone: zone.into(), subzone: String::new() };
        let node = ProxyNode::parse(&id, metadata, locality).unwrap();
        let client = NewClient {
            node,
            version: String::new(),
            address: String::new(),
            identity: String::new(),
            accounted_to: format!("{namespace}/default").into(),
            form: Form::Delta,
        };
        let connected = RUNTIME.block_on(self.publisher.connect(client)).unwrap();
        // Proxies of the same version have the same subscriptions.
        let interest = &connected.0.interest;
        match version {
            "v1" => Kind::ALL.into_iter().for_each(|kind| interest.add_all(kind)),
            _ => interest.add(Kind::Endpoint, [SUBSCRIPTION]),
        }
        self.connected.insert(proxy, connected);
    }

    fn put(&self, file: usize, variant: Option<usize>) {
        let (name, variants) = FILES[file];
        let state = match variant {
            Some(variant) => FileState::Text(variants[variant].to_owned()),
            None => FileState::Deleted,
        };
        self.publisher.apply(vec![FileChange { layer: 0, path: name.to_owned(), state }]);
    }

    /// Applies an answer of DNS: one of [`ADDRESSES`], or none yet.
    fn resolve(&self, name: &str, answer: Option<usize>) {
        let now = answer.map(|answer| {
            let all = ADDRESSES[answer].iter().map(|text| text.parse().unwrap());
            Resolved { addresses: all.clone().collect(), current: all.take(1).collect() }
        });
        self.publisher.resolve(vec![(name.into(), now)]);
    }

    fn snapshot(&self, proxy: usize) -> Snapshot {
        self.connected[&proxy].0.snapshot.borrow().clone()
    }

    /// Returns the resources of a proxy as compiled for it alone.
    fn compiled(&self, proxy: usize) -> Bodies {
        let state = self.publisher.read();
        let view = &state.clients[&self.connected[&proxy].1.id()].view;
        let (made, _) = skysail_model::compile(&state.world, view);
        let all = Kind::ALL.into_iter().flat_map(|kind| made.iter(kind));
        all.map(|resource| ((resource.kind, Arc::clone(&resource.name)), Arc::clone(resource))).collect()
    }

    /// Returns whether a proxy was woken since the last call.
    fn is_woken(&mut self, proxy: usize) -> bool {
        let snapshot = &mut self.connected.get_mut(&proxy).unwrap().0.snapshot;
        let is_woken = snapshot.has_changed().unwrap();
        snapshot.mark_unchanged();
        is_woken
    }
}

fn bodies(snapshot: &Snapshot) -> Bodies {
    let all = Kind::ALL.into_iter().flat_map(|kind| snapshot.iter(kind));
    all.map(|resource| ((resource.kind, Arc::clone(&resource.name)), Arc::clone(resource))).collect()
}

/// Returns the names of the resources that differ.
fn differences(one: &Bodies, other: &Bodies) -> Vec<String> {
    let names: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    let differ = names.into_iter().filter(|name| one.get(*name) != other.get(*name));
    differ.map(|(kind, name)| format!("{kind} {name}")).collect()
}

/// Returns the names of the resources that a client with this generation receives.
fn sent(snapshot: &Snapshot, since: u64) -> BTreeSet<String> {
    let of_kind = |kind| {
        let Changes { resources, removed } = snapshot.changes(kind, since);
        let names = resources.into_iter().map(|resource| Arc::clone(&resource.name)).chain(removed.unwrap());
        names.map(move |name| format!("{kind} {name}")).collect::<Vec<_>>()
    };
    Kind::ALL.into_iter().flat_map(of_kind).collect()
}

#[test]
fn each_proxy_has_the_resources_of_a_fresh_start_and_receives_no_other_changes() {
    let mut not_woken = 0;
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut mesh = Mesh::new();
        let mut files = [None; FILES.len()];
        let mut answers = [None; NAMES.len()];
        let mut had: BTreeMap<usize, (u64, Bodies)> = BTreeMap::new();
        for step in 0..100 {
            let file = random.usize(..FILES.len());
            let variant = random.usize(..=FILES[file].1.len()).checked_sub(1);
            let before = std::mem::replace(&mut files[file], variant);
            let grouping = mesh.publisher.read().grouping.clone();
            if random.bool() {
                mesh.put(file, variant);
            } else {
                // The file does not change.
                files[file] = before;
                let name = random.usize(..NAMES.len());
                answers[name] = random.usize(..=ADDRESSES.len()).checked_sub(1);
                mesh.resolve(NAMES[name], answers[name]);
            }
            let regrouped = mesh.publisher.read().grouping != grouping;
            if random.u8(..4) == 0 {
                let proxy = random.usize(..PROXIES.len());
                if mesh.connected.remove(&proxy).is_none() {
                    mesh.connect(proxy);
                }
                had.remove(&proxy);
            }
            let mut fresh = Mesh::new();
            let mut order: Vec<usize> = (0..FILES.len()).filter(|file| files[*file].is_some()).collect();
            random.shuffle(&mut order);
            order.iter().for_each(|file| fresh.put(*file, files[*file]));
            NAMES.iter().zip(answers).for_each(|(name, answer)| fresh.resolve(name, answer));
            assert_eq!(*mesh.lookup_names.borrow(), *fresh.lookup_names.borrow(), "seed {seed}, step {step}");
            let proxies: Vec<usize> = mesh.connected.keys().copied().collect();
            for proxy in proxies {
                fresh.connect(proxy);
                let at = format!("seed {seed}, step {step}, {}, proxy {proxy}", FILES[file].0);
                let snapshot = mesh.snapshot(proxy);
                let now = bodies(&snapshot);
                let wrong = differences(&now, &bodies(&fresh.snapshot(proxy)));
                assert!(wrong.is_empty(), "{at}: differs from a fresh start: {wrong:?}");
                let wrong = differences(&now, &mesh.compiled(proxy));
                assert!(wrong.is_empty(), "{at}: differs from a compilation for it alone: {wrong:?}");
                if let Some((generation, before)) = had.get(&proxy) {
                    let sent = sent(&snapshot, *generation);
                    let differ: BTreeSet<_> = differences(before, &now).into_iter().collect();
                    let missed: Vec<_> = differ.difference(&sent).collect();
                    assert!(missed.is_empty(), "{at}: not sent: {missed:?}");
                    let needless: Vec<_> = sent.difference(&differ).collect();
                    assert!(needless.is_empty() || regrouped, "{at}: sent without a change: {needless:?}");
                    let has_all = PROXIES[proxy].1 == "v1";
                    let concerned =
                        differ.iter().any(|name| has_all || *name == format!("eds {SUBSCRIPTION}"));
                    let is_woken = mesh.is_woken(proxy);
                    assert!(is_woken || !concerned, "{at}: not woken for {differ:?}");
                    not_woken += usize::from(!is_woken && !differ.is_empty());
                } else {
                    mesh.is_woken(proxy);
                }
                had.insert(proxy, (snapshot.generation(), now));
            }
        }
    }
    assert!(not_woken > 0, "every change wakes every proxy, whatever its subscriptions");
}

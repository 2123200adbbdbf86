//! Health of registered machines: reports are applied together, and a machine without a probe is healthy.

use serde_json::json;
use skysail_xds::server::Event;

use super::{
    scopes::{client, connect, put, service, snapshot},
    *,
};

const GROUP: &str = "{apiVersion: networking.istio.io/v1, kind: WorkloadGroup, metadata: {name: vms, namespace: x}, spec: {metadata: {labels: {app: a}}, template: {serviceAccount: default, ports: {http: 80}}, probe: {httpGet: {path: /, port: 80}}}}";
/// Number of machines.
const MACHINES: usize = 3;

/// A connected proxy.
type ConnectedProxy = (ResourceFeed, Connected);

/// Connects a machine of the group whose agent checks its health.
fn machine(publisher: &Arc<Publisher>, number: usize) -> ConnectedProxy {
    let id = format!("sidecar~192.0.2.{number}~vm-{number}.x~x.svc.cluster.local");
    let metadata = json!({
        "AUTO_REGISTER_GROUP": "vms", "SERVICE_ACCOUNT": "default",
        "PROXY_CONFIG": {"readinessProbe": {"httpGet": {"path": "/", "port": 80}}},
    });
    let node = ProxyNode::parse(&id, metadata, Locality::default()).unwrap();
    let identity = "spiffe://cluster.local/ns/x/sa/default".to_owned();
    connect(publisher, NewClient { node, identity, ..client("x", json!({})) }).unwrap()
}

/// Returns a mesh with a group with a probe, its connected machines, and another proxy.
fn mesh() -> (Arc<Publisher>, Vec<ConnectedProxy>, ConnectedProxy) {
    let publisher = Arc::new(publisher(Compiler::default(), LIMITS));
    put(&publisher, "service", &service("a"));
    put(&publisher, "group", GROUP);
    let machines = (1..=MACHINES).map(|number| machine(&publisher, number)).collect();
    let observer = connect(&publisher, client("x", json!({}))).unwrap();
    (publisher, machines, observer)
}

fn report((_, connected): &ConnectedProxy, error: Option<&str>) {
    connected.report(Event::Health { error });
}

/// Returns the numbers of the machines that are endpoints.
fn endpoints(observer: &ConnectedProxy) -> Vec<usize> {
    let bodies = bodies(&snapshot(observer));
    let name = (Kind::Endpoint, Arc::from("outbound|80||a.x.svc.cluster.local"));
    let text = String::from_utf8_lossy(&bodies[&name].body);
    (1..=MACHINES).filter(|number| text.contains(&format!("192.0.2.{number}"))).collect()
}

fn revision(publisher: &Publisher) -> u64 {
    publisher.read().revision
}

#[test]
fn any_number_of_reports_is_applied_once_and_the_last_one_of_a_machine_counts() {
    let (publisher, machines, observer) = mesh();
    assert!(endpoints(&observer).is_empty());
    let before = revision(&publisher);
    {
        // Reports wait for no lock of the state.
        let _held = publisher.write();
        for _ in 0..1_000 {
            for machine in &machines {
                report(machine, None);
                report(machine, Some("no answer"));
            }
        }
        report(&machines[1], None);
        report(&machines[2], None);
    }
    publisher.apply_health_reports();
    assert_eq!(endpoints(&observer), [2, 3]);
    assert_eq!(revision(&publisher), before + 1, "the reports are published together");
    // Reports without a change take no exclusive lock.
    let _held = publisher.read();
    report(&machines[1], Some("no answer"));
    report(&machines[1], None);
    publisher.apply_health_reports();
    assert_eq!(endpoints(&observer), [2, 3]);
}

#[test]
fn one_task_applies_the_reports_of_all_machines() {
    let (publisher, machines, mut observer) = mesh();
    observer.0.interest.add_all(Kind::Endpoint);
    RUNTIME.block_on(async {
        let task = tokio::spawn(Arc::clone(&publisher).follow_health_reports());
        for (index, machine) in machines.iter().enumerate() {
            report(machine, None);
            while !endpoints(&observer).contains(&(index + 1)) {
                observer.0.snapshot.changed().await.unwrap();
            }
        }
        task.abort();
    });
}

#[test]
fn a_machine_becomes_healthy_when_the_probe_of_its_group_is_removed() {
    let (publisher, machines, observer) = mesh();
    report(&machines[0], None);
    publisher.apply_health_reports();
    assert_eq!(endpoints(&observer), [1]);
    put(&publisher, "group", &GROUP.replace(", probe: {httpGet: {path: /, port: 80}}", ""));
    assert_eq!(endpoints(&observer), [1, 2, 3]);
    // The reports of this time count when the group has a probe again.
    report(&machines[0], Some("no answer"));
    report(&machines[1], None);
    publisher.apply_health_reports();
    assert_eq!(endpoints(&observer), [1, 2, 3]);
    put(&publisher, "group", GROUP);
    assert_eq!(endpoints(&observer), [2]);
    // Without the group, the last reports stay in effect.
    put(&publisher, "group", "");
    assert_eq!(endpoints(&observer), [2]);
}

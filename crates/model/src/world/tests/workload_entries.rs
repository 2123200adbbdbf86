use std::net::IpAddr;

use super::*;

const SELECTING: &str = "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: pool, namespace: svc}
spec:
  hosts: [pool.example.net]
  location: MESH_INTERNAL
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP, targetPort: 8080}, {number: 90, name: tcp, protocol: TCP}]
  workloadSelector: {labels: {app: a}}
";

fn entry(name: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: networking.istio.io/v1\nkind: WorkloadEntry\n\
         metadata: {{name: {name}, namespace: svc, labels: {{tier: gold}}}}\nspec: {{{spec}}}\n"
    )
}

fn change(world: &mut World, yaml: &str) {
    for (object, origin) in crate::parse(yaml, "test.yaml").objects {
        world.apply(object, origin);
    }
}

/// Returns address, port, weight and service account of each endpoint of a host's first port.
fn endpoints(world: &World, host: &str) -> Vec<String> {
    let service = world.service(host).unwrap();
    let endpoints = world.endpoints(service, &service.spec.ports[0]).into_iter();
    let text = |address: &crate::api::Address| match address {
        crate::api::Address::Ip(ip) => ip.to_string(),
        crate::api::Address::Name(name) | crate::api::Address::Unix(name) => name.to_string(),
        crate::api::Address::Hidden => String::new(),
    };
    endpoints
        .map(|it| {
            let account = it.pod.as_ref().map_or("", |pod| pod.spec.service_account.as_str());
            format!("{}:{} {} {account}", text(&it.address), it.port, it.weight)
        })
        .collect()
}

fn key(kind: Kind, name: &str) -> ObjectKey {
    ObjectKey { kind, namespace: "svc".into(), name: name.into() }
}

#[test]
fn entries_are_endpoints_of_the_services_that_select_them() {
    let vm = entry(
        "vm",
        "address: 192.0.2.1, labels: {app: a}, ports: {http: 8890}, weight: 7, serviceAccount: vm",
    );
    let other = entry("other", "address: 192.0.2.2, labels: {app: b}");
    let name = entry("name", "address: vm.example.net, labels: {app: a}");
    let mut world =
        world(&[SERVICE, SELECTING, &vm, &other, &name, &pod("p", "10.1.0.1", "", "True")].concat());
    let both = ["10.1.0.1:8080 1 sa-p", "192.0.2.1:8890 7 vm"];
    assert_eq!(endpoints(&world, "pool.example.net"), both, "a name is no endpoint with STATIC");
    assert_eq!(endpoints(&world, "a.svc.svc.cluster.local"), both, "Services select entries too");
    let service = world.service("pool.example.net").unwrap();
    let of_entry = &world.endpoints(service, &service.spec.ports[1])[1];
    assert_eq!(of_entry.port, 90, "a port that the entry does not name");
    assert!(of_entry.has_sidecar(), "an entry with a service account takes mutual TLS");
    assert!(has_labels(of_entry, &labels(&[("tier", "gold"), ("app", "a")])), "labels of both places");
    let accounts: Vec<String> =
        world.service_identities(service).iter().map(|id| id.service_account.clone()).collect();
    assert_eq!(accounts, ["sa-p", "vm"]);

    // A changed entry touches the services that select it and no others.
    world.take_changes();
    change(&mut world, &vm.replace("192.0.2.1", "192.0.2.9"));
    let changes = world.take_changes();
    let touched: Vec<&str> = changes.services.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(touched, ["a", "pool.example.net"]);
    assert!(!changes.everything && !changes.routes && !changes.names && !changes.workloads);
    assert_eq!(endpoints(&world, "pool.example.net")[1], "192.0.2.9:8890 7 vm");
    change(&mut world, &other.replace("app: b", "app: c"));
    assert!(world.take_changes().services.is_empty());
    assert!(world.delete(&key(Kind::WorkloadEntry, "vm")));
    assert_eq!(endpoints(&world, "pool.example.net"), both[..1]);
}

#[test]
fn names_of_selected_entries_are_resolved() {
    let dns = SELECTING.replace("STATIC", "DNS");
    let vm = entry("vm", "address: VM.example.net., labels: {app: a}");
    let mut world = world(&[&*dns, &pod("p", "10.1.0.1", "", "True")].concat());
    assert!(endpoints(&world, "pool.example.net").is_empty(), "pods are no endpoints with DNS");
    world.take_changes();
    change(&mut world, &vm);
    assert_eq!(world.take_changes().services.len(), 1);
    assert_eq!(endpoints(&world, "pool.example.net"), ["vm.example.net:8080 1 "]);
    assert_eq!(world.names_to_resolve().keys().map(|name| &**name).collect::<Vec<_>>(), ["vm.example.net"]);
    world.delete(&key(Kind::WorkloadEntry, "vm"));
    assert!(world.names_to_resolve().is_empty());
}

#[test]
fn services_lead_to_a_workload_by_its_address() {
    let listed = "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: listed, namespace: svc}
spec:
  hosts: [listed.example.net]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 10.1.0.1, ports: {http: 8081}}, {address: 192.0.2.1}]
---
apiVersion: v1
kind: Service
metadata: {name: manual, namespace: svc}
spec: {clusterIP: 10.0.0.2, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: manual-1, namespace: svc, labels: {kubernetes.io/service-name: manual}}
addressType: IPv4
ports: [{name: http, port: 8082}]
endpoints: [{addresses: [10.1.0.1], conditions: {ready: true}}]
";
    let ip: IpAddr = "10.1.0.1".parse().unwrap();
    let mut world = world(&[SERVICE, listed, &pod("p", "10.1.0.1", "", "True")].concat());
    let at = |world: &World, namespace: &str| {
        let found = world.services_at(namespace, &[ip]).into_iter();
        found.map(|(name, port, target)| format!("{name} {port} {target}")).collect::<Vec<_>>()
    };
    assert_eq!(at(&world, "svc"), ["listed.example.net 80 8081", "manual 80 8082"]);
    assert!(at(&world, "elsewhere").is_empty(), "services of other namespaces open no port");
    world.take_changes();
    change(&mut world, &listed.replace("8082", "8083"));
    assert!(world.take_changes().addresses.contains(&ip));
    world.delete(&key(Kind::EndpointSlice, "manual-1"));
    assert!(world.take_changes().addresses.contains(&ip));
    world.delete(&key(Kind::ServiceEntry, "listed"));
    assert!(world.take_changes().addresses.contains(&ip));
    assert!(at(&world, "svc").is_empty());
    assert_eq!(world.endpoint_ips.iter().count(), 0, "the index holds nothing");

    // A machine with a WorkloadEntry gets the ports of the entry.
    let vm = entry("vm", "address: 10.1.0.1, labels: {app: a}, ports: {http: 8890}");
    change(&mut world, &vm);
    assert_eq!(at(&world, "svc"), ["a 80 8890", "a 81 9000"]);
}

#[test]
fn entries_of_one_host_and_namespace_are_merged() {
    let one = "---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: one, namespace: svc}
spec:
  hosts: [h.example.net]
  resolution: STATIC
  ports: [{number: 80, name: http, protocol: HTTP}]
  endpoints: [{address: 192.0.2.1}]
";
    let two = one.replace("name: one", "name: two").replace("192.0.2.1", "192.0.2.2");
    let three = one
        .replace("name: one", "name: three")
        .replace("number: 80, name: http", "number: 81, name: other")
        .replace("192.0.2.1", "192.0.2.3");
    let world = world(&[one, &two, &three].concat());
    assert_eq!(endpoints(&world, "h.example.net"), ["192.0.2.1:80 1 ", "192.0.2.2:80 1 "]);
    let service = world.service("h.example.net").unwrap();
    let of_other = world.endpoints(service, &service.spec.ports[1]);
    assert_eq!(of_other.iter().map(|it| it.port).collect::<Vec<_>>(), [81]);
    let findings: String = world.validate().iter().map(ToString::to_string).collect();
    assert!(!findings.contains("no effect"), "{findings}");
}

#[test]
fn hosts_below_the_domain_of_the_cluster_add_to_the_service() {
    let below = |host: &str| {
        SELECTING
            .replace("pool.example.net", host)
            .replace("  workloadSelector: {labels: {app: a}}", "  endpoints: [{address: 192.0.2.1}]")
    };
    let vm = below("vm.legacy.svc.cluster.local");
    let same = below("a.svc.svc.cluster.local").replace("name: pool", "name: same");
    let mut world = world(&[SERVICE, &vm, &same, &pod("p", "10.1.0.1", "", "True")].concat());
    assert_eq!(endpoints(&world, "vm.legacy.svc.cluster.local"), ["192.0.2.1:8080 1 "]);
    let both = ["10.1.0.1:8080 1 sa-p", "192.0.2.1:8080 1 "];
    assert_eq!(endpoints(&world, "a.svc.svc.cluster.local"), both);
    let of_entry = world.service_named("svc", "a.svc.svc.cluster.local").unwrap().clone();
    assert!(!world.service_chosen(&of_entry, "svc"), "the Service takes precedence");
    world.take_changes();
    assert!(world.delete(&key(Kind::Service, "a")));
    let changes = world.take_changes();
    assert!(changes.services.contains(&("svc".to_owned(), "a.svc.svc.cluster.local".to_owned())));
    assert!(world.service_chosen(&of_entry, "svc"));
}

#[test]
fn machines_are_registered_with_the_template_of_their_group() {
    let group = "---
apiVersion: networking.istio.io/v1
kind: WorkloadGroup
metadata: {name: vms, namespace: svc}
spec:
  metadata: {labels: {app: a}}
  template: {serviceAccount: vm, ports: {http: 8890}, weight: 3}
  probe: {httpGet: {path: /healthy, port: 8890}}
";
    let node = |account: &str, group: &str| {
        let metadata = serde_json::json!({
            "NAMESPACE": "svc", "SERVICE_ACCOUNT": account, "AUTO_REGISTER_GROUP": group,
            "LABELS": {"version": "v2"}, "INSTANCE_IPS": "192.0.2.7",
        });
        let id = "sidecar~192.0.2.7~vm-1.svc~svc.svc.cluster.local";
        crate::ProxyNode::parse(id, metadata, Locality::default()).unwrap()
    };
    let mut world = world(&[SELECTING, group].concat());
    assert_eq!(world.registration(&node("vm", "")), Ok(None));
    for (account, group, reason) in [
        ("vm", "other", "there is no WorkloadGroup svc/other"),
        ("default", "vms", "is for service account \"vm\", and the proxy runs as \"default\""),
    ] {
        let error = world.registration(&node(account, group)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let machine = world.registration(&node("vm", "vms")).unwrap().unwrap();
    assert_eq!(machine.meta.name, "vms-192.0.2.7");
    assert_eq!(*machine.meta.labels, labels(&[("app", "a"), ("version", "v2")]));
    world.take_changes();
    assert!(world.register(machine.clone()) && !world.register(machine.clone()));
    assert_eq!(world.take_changes().services.len(), 1);
    assert_eq!(endpoints(&world, "pool.example.net"), ["192.0.2.7:8890 3 vm"]);
    assert!(world.unregister("svc", "vms-192.0.2.7") && !world.unregister("svc", "vms-192.0.2.7"));
    assert!(endpoints(&world, "pool.example.net").is_empty());

    // An object of the user is kept.
    let own = entry("vms-192.0.2.7", "address: 192.0.2.8, labels: {app: a}");
    change(&mut world, &own);
    assert!(!world.register(machine) && !world.unregister("svc", "vms-192.0.2.7"));
    assert_eq!(endpoints(&world, "pool.example.net"), ["192.0.2.8:8080 1 "]);
}

#[test]
fn invalid_entries_and_groups_are_refused_by_field() {
    let group = |spec: &str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: WorkloadGroup\nmetadata: {{name: g}}\nspec: {{{spec}}}\n"
        )
    };
    for (yaml, field) in [
        (entry("e", "labels: {a: b}"), "spec.address"),
        (entry("e", "address: 'not a host'"), "spec.address"),
        (entry("e", "address: 'unix://relative'"), "spec.address"),
        (entry("e", "address: 'unix:///s', ports: {http: 80}"), "spec.ports"),
        (entry("e", "address: 192.0.2.1, ports: {http: 70000}"), "spec.ports.http"),
        (entry("e", "address: 192.0.2.1, locality: a//b"), "spec.locality"),
        (group("template: {address: 192.0.2.1}"), "spec.template.address"),
        (group("template: {serviceAccount: a}, probe: {}"), "spec.probe"),
        (group("template: {serviceAccount: a}, probe: {grpc: {port: 0}}"), "spec.probe.grpc.port"),
    ] {
        let parsed = crate::parse(&yaml, "test.yaml");
        let findings: String = parsed.diagnostics.iter().map(ToString::to_string).collect();
        assert!(parsed.objects.is_empty() && findings.contains(field), "{yaml}{findings}");
    }
}

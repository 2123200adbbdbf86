use std::collections::BTreeSet;

use skysail_model::compile;
use skysail_proto::Codec;
use skysail_xds::envoy::pb::envoy::config::{
    endpoint::v3::ClusterLoadAssignment, listener::v3::Listener, route::v3::RouteConfiguration,
};

use super::*;

fn input(template: InputTemplate, services: u32, instances: u32) -> GenerationInput {
    let services = if template.has_services() { services } else { 0 };
    let instances = if template.has_instances() { instances } else { 0 };
    GenerationInput { name: None, template, services, instances }
}

fn resources(template: InputTemplate, services: u32, instances: u32) -> (usize, Resources) {
    let prepared = input(template, services, instances).prepare().unwrap();
    generate(&prepared, &mut PhaseTimes::new()).unwrap()
}

fn decoded<M: Codec>(made: &Resources, kind: Kind) -> Vec<(String, M)> {
    made.iter(kind).map(|one| (one.name.to_string(), M::from_slice(&one.body).unwrap())).collect()
}

/// Returns the number of virtual hosts, and of all their routes, of each route configuration.
fn routes(made: &Resources) -> Vec<(String, usize, usize)> {
    let all = decoded::<RouteConfiguration>(made, Kind::Route).into_iter();
    let count = |(name, of): (String, RouteConfiguration)| {
        let routes = of.virtual_hosts.iter().map(|host| host.routes.len()).sum();
        (name, of.virtual_hosts.len(), routes)
    };
    all.map(count).collect()
}

fn filter_chains(made: &Resources) -> Vec<(String, usize)> {
    let all = decoded::<Listener>(made, Kind::Listener).into_iter();
    all.map(|(name, listener)| (name, listener.filter_chains.len())).collect()
}

fn has_text(made: &Resources, kind: Kind, text: &str) -> bool {
    let finder = memchr::memmem::Finder::new(text);
    made.iter(kind).any(|one| finder.find(&one.body).is_some())
}

/// The numbers of objects are those of the templates of istiod's benchmark, plus the objects that its test code or mesh
/// configuration contains.
#[test]
fn inputs_have_the_numbers_of_objects_of_their_templates() {
    for (template, expected) in [
        (InputTemplate::Gateways, 1 + 3 * 5),
        (InputTemplate::GatewaysShared, 2 + 2 * 5),
        (InputTemplate::KnativeGateway, 4 + 2 * 5),
        (InputTemplate::Secrets, 1 + 5),
        (InputTemplate::Empty, 1 + 5),
        (InputTemplate::Http, 1 + 5),
        (InputTemplate::Tcp, 1 + 5),
        (InputTemplate::Tls, 1 + 5),
        (InputTemplate::Auto, 1 + 5),
        (InputTemplate::Strict, 2),
        (InputTemplate::Disabled, 2),
        (InputTemplate::Externalname, 1 + 5),
        (InputTemplate::TelemetryApi, 3 + 5),
        (InputTemplate::Virtualservice, 1 + 2 * 5),
        (InputTemplate::Authorizationpolicy, 1 + 5),
        (InputTemplate::ServiceentryWorkloadentry, 1 + 5 + 7),
        (InputTemplate::Endpoints, 4 + 5),
    ] {
        let (objects, _) = resources(template, 5, 7);
        assert_eq!(objects, expected, "{template:?}");
    }
}

#[test]
fn the_phases_make_what_the_control_plane_sends() {
    for template in InputTemplate::ALL {
        let prepared = input(template, 3, 4).prepare().unwrap();
        let (_, made) = generate(&prepared, &mut PhaseTimes::new()).unwrap();
        let (mut files, mut world) = (Files::new(), World::new());
        files.set(0, FILE, &prepared.text).into_iter().for_each(|change| _ = change.apply_to(&mut world));
        world.take_changes();
        let mut node = prepared.node.clone();
        world.identify(&mut node, "Kubernetes").unwrap();
        assert_eq!(made, compile(&world, &node.view).0, "{template:?}");
        assert!(made.len(Kind::Cluster) > 0 && made.len(Kind::Listener) > 0, "{template:?}");
    }
}

#[test]
fn each_virtual_service_of_a_gateway_gives_a_virtual_host_and_each_server_a_filter_chain() {
    let (_, made) = resources(InputTemplate::Gateways, 10, 0);
    let routes = routes(&made);
    // One route configuration for HTTP, and one for each server for HTTPS. A virtual host has the three hosts of its
    // VirtualService.
    assert_eq!(routes.len(), 11, "{routes:?}");
    assert!(routes.contains(&("http.80".to_owned(), 10, 10)), "{routes:?}");
    assert_eq!(
        routes.iter().filter(|(_, hosts, routes)| (*hosts, *routes) == (1, 1)).count(),
        10,
        "{routes:?}"
    );
    for host in ["www-0.edge.example", "api-5.edge.example", "img-9.edge.example"] {
        assert!(has_text(&made, Kind::Route, host), "{host}");
    }
    assert_eq!(filter_chains(&made), [("0.0.0.0_443".to_owned(), 10), ("0.0.0.0_80".to_owned(), 1)]);
}

#[test]
fn a_shared_gateway_has_one_virtual_host_with_many_routes() {
    let (_, made) = resources(InputTemplate::GatewaysShared, 10, 0);
    let routes = routes(&made);
    let counts: Vec<_> = routes.iter().map(|(_, hosts, routes)| (*hosts, *routes)).collect();
    assert_eq!(counts, [(1, 60); 2], "{routes:?}");
}

#[test]
fn virtual_services_of_knative_share_their_hosts() {
    let (_, made) = resources(InputTemplate::KnativeGateway, 10, 0);
    // Of each service, 2 routes for the outer gateway, and 2 of each of its VirtualServices for the inner one.
    assert_eq!(routes(&made), [("http.80".to_owned(), 1, 20), ("http.8081".to_owned(), 2, 40)]);
}

#[test]
fn each_secret_of_a_server_is_sent() {
    let (_, made) = resources(InputTemplate::Secrets, 10, 0);
    assert_eq!(made.len(Kind::Secret), 10);
    assert_eq!(filter_chains(&made), [("0.0.0.0_443".to_owned(), 10)]);
}

#[test]
fn each_virtual_service_gives_a_virtual_host() {
    let (_, made) = resources(InputTemplate::Virtualservice, 100, 0);
    // Beside them: the own service, and the hosts that the proxy does not know. Two matches are two routes.
    assert_eq!(routes(&made), [("80".to_owned(), 102, 202)]);
    assert_eq!(made.len(Kind::Endpoint), 101);
}

#[test]
fn services_have_clusters_and_listeners_by_their_ports() {
    let count = |template| {
        let (_, made) = resources(template, 100, 0);
        [Kind::Cluster, Kind::Endpoint, Kind::Listener, Kind::Route].map(|kind| made.len(kind))
    };
    // Clusters: a port of a service each, the own port, and three of every sidecar. Listeners: HTTP shares one, each
    // address of a service has one otherwise; two are of every sidecar.
    assert_eq!(count(InputTemplate::Http), [101 + 4, 101, 3, 1]);
    assert_eq!(count(InputTemplate::Tcp), [101 + 4, 101, 103, 0]);
    assert_eq!(count(InputTemplate::Tls), [101 + 4, 101, 103, 0]);
    assert_eq!(count(InputTemplate::Auto), [101 + 4, 101, 103, 101]);
    assert_eq!(count(InputTemplate::Empty), [4 * 101 + 7, 4 * 101, 306, 102]);
}

#[test]
fn policies_and_telemetry_are_in_the_listeners() {
    for (template, has_tls) in [(InputTemplate::Strict, true), (InputTemplate::Disabled, false)] {
        let (_, made) = resources(template, 0, 0);
        assert_eq!(has_text(&made, Kind::Listener, "DownstreamTlsContext"), has_tls, "{template:?}");
    }
    let (_, made) = resources(InputTemplate::Authorizationpolicy, 100, 0);
    for number in [0, 99] {
        assert!(has_text(&made, Kind::Listener, &format!("ns[default]-policy[deny-{number}]-rule[0]")));
    }
    let (_, made) = resources(InputTemplate::TelemetryApi, 2, 0);
    assert!(has_text(&made, Kind::Listener, "FileAccessLog"));
}

#[test]
fn endpoints_are_those_of_the_workload_entries() {
    let (_, made) = resources(InputTemplate::ServiceentryWorkloadentry, 10, 50);
    let all = decoded::<ClusterLoadAssignment>(&made, Kind::Endpoint);
    let addresses =
        |of: &ClusterLoadAssignment| of.endpoints.iter().map(|group| group.lb_endpoints.len()).sum::<usize>();
    let counts: BTreeSet<usize> =
        all.iter().filter(|(name, _)| name.contains("shop-")).map(|(_, of)| addresses(of)).collect();
    assert_eq!((all.len(), counts), (44, BTreeSet::from([5])), "50 entries, 10 services, 4 ports");
}

/// A client whose network is unknown uses gateways, which need mutual TLS. The endpoints do not take it.
#[test]
fn endpoints_of_other_networks_without_mutual_tls_are_left_out() {
    let (_, made) = resources(InputTemplate::Endpoints, 3, 8);
    let all = decoded::<ClusterLoadAssignment>(&made, Kind::Endpoint);
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|(_, of)| of.endpoints.iter().all(|group| group.lb_endpoints.is_empty())));
}

#[test]
fn repetitions_and_figures_are_counted() {
    let prepared = input(InputTemplate::Http, 3, 0).prepare().unwrap();
    let once = measure(&prepared, Duration::ZERO, Duration::ZERO).unwrap();
    assert_eq!((once.repetitions, once.objects, once.input_bytes), (1, 4, prepared.text.len()));
    assert_eq!(once.phases.len(), 6);
    assert!(once.phases.values().all(|cost| cost.cpu_us > 0.0 && cost.time_us > 0.0), "{once:?}");
    let cds = once.resources["cds"];
    assert!(cds.number >= 4 && cds.bytes > 100 * cds.number, "{once:?}");
    assert_eq!(once.resources["nds"].number, 1);
    let again = measure(&prepared, Duration::ZERO, Duration::from_millis(20)).unwrap();
    assert_eq!(again.resources, once.resources, "resources are the same each time");
}

#[test]
fn an_input_is_yaml_in_block_style() {
    let text = inputs::text(&input(InputTemplate::Externalname, 1, 0)).unwrap();
    let service = text.split("---\n").last().unwrap();
    assert_eq!(
        service,
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: shop-0\n  namespace: default\nspec:\n  \
         externalName: shop-0.example.net\n  ports:\n    - name: http\n      port: 80\n  type: ExternalName\n"
    );
}

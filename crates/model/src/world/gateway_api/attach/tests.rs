use super::*;

/// Returns a Gateway with a listener for each host, and a route for all of `hostnames` at each listener.
fn world(protocols: [&str; 4], hostnames: &str) -> World {
    let hosts = ["", "*.example.com", "*.foo.example.com", "abc.foo.example.com"];
    let listeners = hosts.iter().zip(protocols).enumerate().map(|(number, (host, protocol))| {
        let host = if host.is_empty() { String::new() } else { format!("hostname: '{host}', ") };
        format!("{{name: l{number}, {host}{protocol}}}")
    });
    let listeners: Vec<String> = listeners.collect();
    let routes = (0..hosts.len()).map(|number| {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r{number}, namespace: shop}}\n\
             spec: {{parentRefs: [{{name: edge, sectionName: l{number}}}], hostnames: [{hostnames}]}}\n"
        )
    });
    let gateway = format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: edge, namespace: shop}}\n\
         spec: {{gatewayClassName: istio, listeners: [{}]}}\n",
        listeners.join(", ")
    );
    let mut world = World::new();
    // Listeners for HTTPS without settings of TLS are warned about.
    for (object, origin) in crate::parse(&(gateway + &routes.collect::<String>()), "test.yaml").objects {
        world.apply(object, origin);
    }
    world.settle();
    world
}

/// Returns the hosts of each listener's route.
fn hosts(world: &World) -> Vec<String> {
    (0..4)
        .map(|number| {
            let of_listener = |name: &String| name.ends_with(&format!("~l{number}"));
            let bound = world.virtual_services.iter().map(|entry| &entry.object.spec);
            let bound = bound.filter(|of| of.gateways.iter().any(of_listener));
            bound.flat_map(|of| of.hosts.clone()).collect::<Vec<_>>().join(" ")
        })
        .collect()
}

const ALL: &str = "bar.com, '*.example.com', '*.foo.example.com', abc.foo.example.com";

#[test]
fn hosts_of_a_more_specific_listener_are_left_to_it() {
    let same = ["port: 80, protocol: HTTP"; 4];
    let expected = ["bar.com", "*.example.com", "*.example.com *.foo.example.com"];
    let last = "*.example.com *.foo.example.com abc.foo.example.com";
    assert_eq!(hosts(&world(same, ALL)), [expected[0], expected[1], expected[2], last]);
    assert_eq!(hosts(&world(same, "")), ["*"; 4]);
    let others = "a.bar.example.com, '*.bar.foo.example.com'";
    assert_eq!(hosts(&world(same, others)), ["", "a.bar.example.com", "*.bar.foo.example.com", ""]);
}

#[test]
fn listeners_of_other_ports_and_protocols_take_no_hosts() {
    let http = "port: 80, protocol: HTTP";
    let apart = world([http, "port: 81, protocol: HTTP", http, "port: 80, protocol: HTTPS"], ALL);
    let expected = [
        "*.example.com bar.com",
        "*.example.com *.foo.example.com abc.foo.example.com",
        "*.example.com *.foo.example.com abc.foo.example.com",
        "",
    ];
    assert_eq!(hosts(&apart), expected);
}

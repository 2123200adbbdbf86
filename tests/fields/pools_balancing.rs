//! DestinationRule: new endpoints, and the ejection of endpoints, for `skysail-proxy` and for a real Envoy.

use skysail_testkit::{Mesh, eventually};

use crate::{
    CLIENTS, ask, check, get, mesh_with,
    pools_connections::{ONE_PORT, TWO_PORTS, address, services, statistic},
    wait,
};

const RULES: &str = include_str!("pools_balancing.yaml");
/// Requests of which two endpoints with the same weight each get half.
const MANY: usize = 40;

/// Returns a ServiceEntry with these endpoints for each host.
fn entries(hosts: &[&str], addresses: &[&str]) -> String {
    let endpoints: Vec<String> = addresses
        .iter()
        .map(|address| format!("{{address: {address}, labels: {{set: all}}, ports: {{http: 8080}}}}"))
        .collect();
    let endpoints = endpoints.join(", ");
    let one = |host: &&str| {
        format!(
            "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {{name: {host}, namespace: shop}}\n\
             spec: {{hosts: [{host}.example.com], resolution: STATIC, endpoints: [{endpoints}], \
             ports: [{{number: 80, name: http, protocol: HTTP}}]}}\n"
        )
    };
    hosts.iter().map(one).collect()
}

/// Returns how many of some requests the pod of `api-v2` answers.
fn share(mesh: &Mesh, client: &str, host: &str, path: &str) -> usize {
    let url = format!("http://{host}.example.com/{path}");
    let output = mesh.run(&["call", client, &url, "-n", &MANY.to_string()]);
    let text = String::from_utf8_lossy(&output.stdout);
    let count = |version: &str| text.matches(&format!("\"version\":\"{version}\"")).count();
    assert_eq!(count("v1") + count("v2"), MANY, "{client} {host}: {output:?}");
    count("v2")
}

#[test]
fn new_endpoints_are_warmed_up() {
    const HOSTS: [&str; 4] = ["slow-start", "old-start", "high-start", "steep-start"];
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    let [one, two] = ["api-v1", "api-v2"].map(|workload| address(&mesh, workload));
    mesh.put("least.yaml", &entries(&["least"], &[&one, &two]));
    mesh.put("entries.yaml", &entries(&HOSTS, &[&one]));
    for client in CLIENTS {
        // A proxy gets the endpoints of a host with the first request.
        for host in ["least"].iter().chain(&HOSTS) {
            wait(&mesh, client, &get(&format!("http://{host}.example.com/"), 200, &["\"pod\""]));
        }
        eventually(&format!("both answer {client}"), || match share(&mesh, client, "least", "least") {
            0 | MANY => Err("one answers all".to_owned()),
            _ => Ok(()),
        });
        let share = share(&mesh, client, "least", "");
        assert!(matches!(share, 0 | MANY), "{client}: {share} of {MANY}");
    }
    for client in CLIENTS {
        // The first endpoint gets older with each try, the second one is new each time.
        eventually(&format!("{client} warms the new endpoint up"), || {
            mesh.put("entries.yaml", &entries(&HOSTS, &[&one]));
            HOSTS.iter().for_each(|host| wait_members(&mesh, client, host, 1));
            mesh.put("entries.yaml", &entries(&HOSTS, &[&one, &two]));
            HOSTS.iter().for_each(|host| wait_members(&mesh, client, host, 2));
            let [slow, old, high, steep] = HOSTS.map(|host| share(&mesh, client, host, ""));
            let is_it = slow <= MANY / 4 && old <= MANY / 4 && high >= MANY / 3 && steep >= MANY / 3;
            if is_it { Ok(()) } else { Err(format!("{slow} {old} {high} {steep} of {MANY}")) }
        });
    }
}

/// Waits until a client's proxy has this many endpoints of a host.
fn wait_members(mesh: &Mesh, client: &str, host: &str, count: usize) {
    eventually(&format!("{client} has {count} endpoints of {host}"), || {
        let page = mesh.call(client, "http://127.0.0.1:15000/clusters", &[]).body;
        let is_endpoint = |line: &&str| line.contains(&format!("||{host}.")) && line.contains("::weight::");
        match page.lines().filter(is_endpoint).count() {
            found if found == count => Ok(()),
            found => Err(format!("{found}: {page}")),
        }
    });
}

#[test]
fn ejections_have_further_settings() {
    let services = [
        services("fragile", &["often", "rarely", "panicking"], ONE_PORT),
        services("fragile", &["one-port"], TWO_PORTS),
    ];
    let mesh = mesh_with(&[RULES, &services.concat()].concat(), &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        let fails =
            |host: &str| ask(&mesh, client, &get(&format!("http://{host}/?status=500"), 500, &["\"pod\""]));
        let is_ejected =
            |host: &str| ask(&mesh, client, &get(&format!("http://{host}/"), 503, &["no healthy upstream"]));
        let answers = |host: &str| wait(&mesh, client, &get(&format!("http://{host}/"), 200, &["\"pod\""]));
        let eject = |host: &str| {
            answers(host);
            eventually(&format!("the endpoint of {host} is ejected for {client}"), || {
                // A response of another status would end the series.
                (0..2).for_each(|_| drop(fails(host)));
                is_ejected(host)
            });
        };
        eject("rarely");
        // It returns twice, and the other does not: it has another interval.
        for _ in 0..2 {
            eject("often");
            answers("often");
        }
        is_ejected("rarely").unwrap();

        // An ejected endpoint is used if too few are left.
        answers("panicking");
        eventually(&format!("the endpoint is ejected for {client}"), || {
            fails("panicking")?;
            match statistic(&mesh, client, "panicking", "ejections_active") {
                1 => Ok(()),
                count => Err(format!("{count} are ejected")),
            }
        });
        check(&mesh, &[client], &[get("http://panicking/", 200, &["\"pod\""])]);

        eject("one-port:81");
        (0..6).for_each(|_| fails("one-port:80").unwrap());
        check(&mesh, &[client], &[get("http://one-port/", 200, &["\"pod\""])]);
        is_ejected("one-port:81").unwrap();
    }
}

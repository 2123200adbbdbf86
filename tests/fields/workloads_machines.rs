//! WorkloadGroup: what the template gives to machines that register themselves.

use skysail_testkit::{Mesh, eventually};

use crate::{CLIENTS, get, mesh_with, wait};

const RULES: &str = include_str!("workloads_machines.yaml");
/// A gateway of the network of one machine. Nobody listens at its address.
const GATEWAY: &str = "
apiVersion: v1
kind: Service
metadata: {name: crossing, namespace: shop, labels: {topology.istio.io/network: far}}
spec: {externalIPs: [192.0.2.1], selector: {app: none}, ports: [{name: tls, port: 15443}]}
";

/// Returns how many of 20 requests each of two machines answers.
fn shares(mesh: &Mesh, client: &str, host: &str) -> Result<(usize, usize), String> {
    let output = mesh.run(&["call", client, &format!("http://{host}/"), "-n", "20"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let count = |name: &str| text.matches(&format!("\"name\":\"{name}-")).count();
    let shares = (count("light"), count("heavy"));
    if shares.0 + shares.1 == 20 { Ok(shares) } else { Err(format!("{shares:?} {output:?}")) }
}

#[test]
fn machines_have_the_settings_of_their_group() {
    let mesh = mesh_with(RULES, &["shop/by-envoy"]).ready();
    for client in CLIENTS {
        // The Services select the machines by labels of the template.
        wait(&mesh, client, &get("http://red/", 200, &["\"name\":\"distant-", "ns/shop/sa/buyer"]));
        eventually(&format!("the heavy machine answers {client}"), || {
            match shares(&mesh, client, "weighted")? {
                (0..6, _) => Ok(()),
                shares => Err(format!("{shares:?}")),
            }
        });
        eventually(&format!("the machine of the place answers {client}"), || {
            match shares(&mesh, client, "placed")? {
                (20, 0) => Ok(()),
                shares => Err(format!("{shares:?}")),
            }
        });
    }
    mesh.put("gateway.yaml", GATEWAY);
    for client in CLIENTS {
        wait(&mesh, client, &get("http://red/", 503, &["upstream connect error"]));
        let endpoints = mesh.call(client, "http://127.0.0.1:15000/clusters", &[]).body;
        assert!(endpoints.contains("||red.shop.svc.cluster.local::192.0.2.1:15443::"), "{endpoints}");
        // Machines of other networks are reached as before.
        wait(&mesh, client, &get("http://placed/", 200, &["\"name\":\"light-"]));
    }
}

//! Checks of a whole service graph: names, the entry point, and the callees of calls.

use std::collections::HashMap;

use skysail_yaml::Node;

use super::model::ServiceGraph;

/// A call and its place in the file.
#[derive(Clone, Debug)]
pub(super) struct CallSite {
    /// Index of the caller.
    pub(super) caller: usize,
    /// Name of the callee.
    pub(super) callee: String,
    pub(super) line: u32,
    /// Path of the field.
    pub(super) field: String,
}

/// Refuses two services with one name. `nodes` are those of the services.
pub(super) fn names(graph: &ServiceGraph, nodes: &[Node]) -> Result<(), String> {
    let mut lines: HashMap<&str, u32> = HashMap::new();
    for (at, (service, node)) in graph.services.iter().zip(nodes).enumerate() {
        let line = node.get("name").map_or(node.line, |name| name.line);
        if let Some(first) = lines.insert(&service.name, line) {
            return Err(format!(
                "{line}: services[{at}].name: the service {} is also on line {first}; rename one of them",
                service.name
            ));
        }
    }
    Ok(())
}

/// Refuses a graph that no request can enter. `line` is that of the services.
pub(super) fn entry_point(graph: &ServiceGraph, line: u32) -> Result<(), String> {
    if graph.services.iter().any(|service| service.is_entry_point) {
        return Ok(());
    }
    Err(format!(
        "{line}: services: no service has `isEntrypoint: true`, so no request can enter the graph; set it for the first service"
    ))
}

/// Refuses calls of unknown services, and cycles: their services would call each other without end.
pub(super) fn calls(graph: &ServiceGraph, sites: &[CallSite]) -> Result<(), String> {
    let index = graph.index();
    let mut edges: Vec<Vec<(usize, &CallSite)>> = vec![Vec::new(); graph.services.len()];
    for site in sites {
        let callee = index.get(site.callee.as_str()).ok_or_else(|| {
            format!(
                "{}: {}: there is no service {}; correct the name, or add the service",
                site.line, site.field, site.callee
            )
        })?;
        edges[site.caller].push((*callee, site));
    }
    #[derive(Clone, Copy, PartialEq)]
    enum Visit {
        New,
        Open,
        Done,
    }
    let mut visits = vec![Visit::New; edges.len()];
    for start in 0..edges.len() {
        if visits[start] != Visit::New {
            continue;
        }
        visits[start] = Visit::Open;
        // Services from the start to the current one, each with the number of its calls that were followed.
        let mut path = vec![(start, 0)];
        while let Some((service, followed)) = path.last_mut() {
            let Some(&(callee, site)) = edges[*service].get(*followed) else {
                visits[*service] = Visit::Done;
                path.pop();
                continue;
            };
            *followed += 1;
            match visits[callee] {
                Visit::Done => {}
                Visit::New => {
                    visits[callee] = Visit::Open;
                    path.push((callee, 0));
                }
                Visit::Open => {
                    let open =
                        path.iter().map(|(service, _)| *service).skip_while(|service| *service != callee);
                    let names: Vec<&str> =
                        open.chain([callee]).map(|service| graph.services[service].name.as_str()).collect();
                    return Err(format!(
                        "{}: {}: the calls {} are a cycle without end; remove one of them",
                        site.line,
                        site.field,
                        names.join(" -> ")
                    ));
                }
            }
        }
    }
    Ok(())
}

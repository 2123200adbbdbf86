//! Pods without a cluster: namespaces, links, interception, processes, names

//! Load generator, topologies, peers and reports

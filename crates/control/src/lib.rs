//! skysaild: sources, publication, discovery service, certificate service

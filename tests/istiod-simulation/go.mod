module skysail.example/tests/istiod-simulation

go 1.26.0

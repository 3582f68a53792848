"""The modules of the agent import each other in no circle; only commands, reports and experiments import them."""

from test_architecture import cycle, graph, imports, modules


def test_modules_form_no_cycle():
    names = {name: path for name, path in modules().items() if f"{name}.".startswith("rl.")}
    edges = {}
    for name, path in names.items():
        used = imports(path.read_text("utf-8"), name, path.name == "__init__.py")
        edges[name] = {
            other for other in names for thing in used if thing == other or thing.rpartition(".")[0] == other
        }
    assert "rl.env.rooms" in edges["rl.policies"]
    assert not cycle({name: used - {"rl", "rl.env", "rl.agent"} for name, used in edges.items()})


def test_only_commands_reports_and_experiments_import_the_agent():
    edges = graph()
    assert sorted(name for name, used in edges.items() if "rl" in used) == ["analysis", "cli", "experiments"]
    below = {"config", "console", "kernels", "model", "runs", "runtime", "training", "distributed", "plotting"}
    assert edges["rl"] <= below

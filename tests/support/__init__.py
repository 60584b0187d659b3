"""What tests share: models, random programs, other worlds, and programs that tests start as processes."""

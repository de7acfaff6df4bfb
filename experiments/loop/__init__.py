"""train_gpu 的零件：选项、batch、开始、检查点、日志。"""
